//! Each step consumes the session.

use leasehold::KernelSession;
use leasehold::kernel::{Parametrised, session_ops as ops};

fn twice(session: KernelSession<'_, Parametrised>) {
    ops::dispatch_1d(session, 1, 1).unwrap();
    ops::dispatch_1d(session, 1, 1).unwrap();
}

fn main() {}
