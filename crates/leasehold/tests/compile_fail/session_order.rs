//! Wait, bind, parameters, dispatch, tokens, finish: no step comes before the one before it, and
//! none is left out.

use leasehold::kernel::{Begun, Bound, Dispatched, Parametrised, Ready, session_ops as ops, session_sync_ops as sync};
use leasehold::KernelSession;

fn bind_before_wait(session: KernelSession<'_, Begun>) {
    ops::bind(session).unwrap();
}

fn params_before_bind(session: KernelSession<'_, Ready>) {
    ops::no_params(session).unwrap();
}

fn dispatch_before_params(session: KernelSession<'_, Bound>) {
    ops::dispatch_1d(session, 1, 1).unwrap();
}

fn tokens_before_dispatch(session: KernelSession<'_, Parametrised>) {
    sync::update_tokens(session);
}

fn finish_before_tokens(session: KernelSession<'_, Dispatched>) {
    session.finish().unwrap();
}

fn another_kernel_before_tokens<'s>(session: KernelSession<'s, Dispatched>, kernel: &'s leasehold::KernelBase) {
    session.kernel(kernel).unwrap();
}

fn main() {}
