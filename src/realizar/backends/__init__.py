"""Where models run: one protocol, one folder per kind of device."""
