"""What learns: stock Hugging Face mixture-of-experts models whose experts are split into claimed and frozen ones."""
