"""Models on the Hugging Face hub: what they are called, downloading them into the ordinary cache, uploading results."""
