"""`flashduet bench`: how fast the engines are, against what they promise."""
