"""Training in other ways: checkpoints, distillation, opponents.  May import rooms up to memory."""
