//! Small programs that show what a CUDA driver does, and times of loops over the driver alone.
//!
//! | module | content |
//! |---|---|
//! | [`trace`] | programs that show a driver's behaviour, and kernels |
//! | [`figures`] | times of loops over the driver alone |
//! | [`raw_stream`] | a stream, memory and graphs for loops over another library of the vendor's |
//! | [`vouched`] | the driver's interface for a program that vouches once for all its handles |
//!
//! The traces of the vendor's driver are recorded. The simulated one must give the same answers.

pub mod figures;
pub mod raw_stream;
pub mod trace;
pub mod vouched;
