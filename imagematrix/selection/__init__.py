"""Which variant fits a host: the rules, the order, the answer with its reasons."""
