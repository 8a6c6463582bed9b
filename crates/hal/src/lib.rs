//! The border between the runtime and its backends.
