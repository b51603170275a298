"""Vision-language models: images to tokens, pixel tensors and positions."""
