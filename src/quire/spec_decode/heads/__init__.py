"""Published drafters: from a checkpoint's config and tensors to graphs over the decoder's ops."""
