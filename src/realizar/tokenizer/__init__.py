"""Text to token ids and back, chat templates, and where a text stops. Imports nothing until used."""
