"""The policy's weights, tokenizer and chat format.

    known     small models known by name, and where each comes from
    resolve   a name -> a folder or a hub name (downloads a known model once)
    cache     the download and its one-time conversion, safe among concurrent processes
    convert   GGUF -> plain Hugging Face folder
    tiny      a policy made on the spot
    load      a config section -> `LoadedModel`; saving one
    adapters  LoRA over a base that stays
    chat      messages -> token ids, turn by turn, without re-encoding what the model said
    vision    images -> token ids, pixel tensors and positions
    tool_calls  tool calls and reasoning out of the model's text
    attention, linear   how the model computes

Nothing is imported here, so that names can be listed without loading torch.
"""
