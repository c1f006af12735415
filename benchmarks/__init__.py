"""What the README's numbers come from."""
