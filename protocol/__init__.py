"""What crosses between the floors: immutable, typed, versioned; knows nobody."""
