//! Behaviour of the CPU backend at the border of `hal`, on the machine at hand.

mod common;
mod debug;
mod faults;
mod graphs;
mod life;
mod memory;
mod streams;
mod topology;
mod transfers;
