"""The endpoints of Hugging Face's Text Generation Inference, behind --tgi-api."""
