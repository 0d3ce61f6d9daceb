"""The commands of `baton`, one module each: flags, and a function that imports the work when it runs."""
