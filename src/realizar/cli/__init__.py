"""The command `realizar`, one module per command. Only this package prints; heavy imports wait for the command."""
