"""The doctor: checks a set-up, and says what to do about what is wrong with it."""
