"""The tests of clipjax."""
