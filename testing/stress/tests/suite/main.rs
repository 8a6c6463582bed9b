//! Random programs of a few seeds, on one device and on several ranks.

mod common;
mod programs;
mod ranks;
