//! Tests of the simulated driver: Metal's rules, one by one.

mod bench;
mod failures;
mod memory;
mod objects;
mod order;
mod rules;
