"""The command `realizar`. Only this package prints; heavy imports happen when a command runs."""
