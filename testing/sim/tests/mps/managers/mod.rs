//! Tests of the managers over the simulated driver.

mod bench;
mod devices;
mod failures;
mod resources;
mod work;
