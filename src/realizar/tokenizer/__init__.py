"""Tokenizers, chat templates, parsers of answers, and stop conditions. Heavy imports happen at first use."""
