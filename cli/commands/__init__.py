"""One file for each command of `baton`: its flags, and what it does with them. Imports beyond the flags are lazy."""
