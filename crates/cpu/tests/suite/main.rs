//! Tests of the CPU backend through `hal`, on this machine.

mod common;
mod debug;
mod faults;
mod graphs;
mod life;
mod memory;
mod streams;
mod topology;
mod transfers;
