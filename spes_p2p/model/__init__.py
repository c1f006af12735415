"""The model: a stock Hugging Face mixture of experts whose experts are split into claimed and frozen ones."""
