//! The shared parts of the backends' tests: a backend over its simulated driver ([`Bench`]), short
//! names of the calls that tests make, a random program that finds mistakes in the order of work
//! ([`order`]), and a life cycle that runs under every failing driver call ([`faults`]).
//!
//! A backend's tests implement [`Subject`] for a type of their own.
//!
//! Tests alone use this module, and no registry's package has it. So its functions are safe,
//! although they submit work: each test keeps the contract that [`submit`] states.
//!
//! This module must not know a backend or a case.

mod bench;
pub mod faults;
pub mod order;
mod work;

pub use bench::{Bench, Subject, two_devices};
pub use leasehold_sim::Dice;
pub use work::{
    Host, bind, buffer, copy, dispatch, fill, one, read, stream, submit, try_buffer, wait,
};
