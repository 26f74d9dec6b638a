"""One thin module per DVC stage, with the stage's name: read files, call a package, write files."""
