//! A deterministic virtual accelerator.
