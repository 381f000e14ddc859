"""What all parties share: the task, keys, messages, policies, ledgers."""
