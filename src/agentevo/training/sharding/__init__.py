"""One model computed by several processes together: tensor, context and expert parallelism."""
