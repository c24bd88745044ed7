"""SGLang's native endpoints, behind --sglang-api."""
