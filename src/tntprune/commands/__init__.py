"""What each command does, one file each. Heavy imports happen inside, so that --help is quick."""
