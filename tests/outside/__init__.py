"""The tests of other libraries, with clipjax in the place of what they test: `python -m tests.outside`."""
