//! Tests of the backend over the simulated driver.

mod bench;
mod memory;
mod transfers;
