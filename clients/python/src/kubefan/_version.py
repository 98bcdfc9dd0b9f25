"""The version of the package. The build and the channel read it here."""

__version__ = "0.1.0"
