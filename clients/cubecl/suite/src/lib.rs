//! CubeCL's own tests are in `tests/suite.rs`.
