"""Learning to read dates: `python -m fast_transformer.demo` compares torch.nn with its twins, with `--rnn` recurrent models."""
