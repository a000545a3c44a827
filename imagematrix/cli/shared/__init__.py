"""What commands share: options, output, and the parts that more than one command has."""
