//! Parts of a library and their orders, without a library.

use super::*;
use crate::driver::Call;
use leasehold::backend::sync::atomic::{AtomicBool, Ordering};

struct Part(Arc<AtomicBool>);

impl Communicator for Part {
    unsafe fn enqueue(&self, _: u64, _: &[Call<'_>]) -> Result<()> {
        Ok(())
    }
    fn abort(&self, _: Error) {}
    fn destroy(&self) -> Result<()> {
        self.0.store(true, Ordering::Release);
        Ok(())
    }
}

/// A part that was dropped, and whether it was given back.
fn dropped(outbox: &Arc<Outbox>) -> Arc<AtomicBool> {
    let gone = Arc::new(AtomicBool::new(false));
    let part = Arc::new(Part(gone.clone()));
    let make = move || Ok(Some(part as Arc<dyn Communicator>));
    let limit = Duration::from_secs(30);
    drop(Native::make("t", limit, outbox.clone(), || Ok(()), make).unwrap().unwrap());
    gone
}

/// Waits for the part's thread.
fn given_back(gone: &AtomicBool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !gone.load(Ordering::Acquire) {
        assert!(Instant::now() < until, "it was not given back");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_order_waits_for_the_thread_that_passes_it_on_and_is_never_lost() {
    let outbox = Arc::new(Outbox::default());
    given_back(&dropped(&outbox));
    outbox.pass_on(true);
    let gone = dropped(&outbox);
    thread::sleep(Duration::from_millis(20));
    assert!(!gone.load(Ordering::Acquire), "the drop has woken the part's thread");
    outbox.pass_on(true);
    given_back(&gone);
    let gone = dropped(&outbox);
    outbox.pass_on(false);
    given_back(&gone);
    given_back(&dropped(&outbox));
    outbox.pass_on(true);
    let gone = dropped(&outbox);
    drop(outbox);
    given_back(&gone);
}
