//! Host memory that calls borrow: whatever goes wrong, nobody touches it once the call is over.

use crate::common::*;
use leasehold::backend::Traced;
use leasehold::backend::sync::atomic::{AtomicUsize, Ordering};
use leasehold::{BackendKind, Context, DeviceId, Error, Runtime, View};
use leasehold_sim::{MachineConfig, SimBackend};
use std::sync::Arc;
use std::time::Duration;

/// A simulated device on which a wait gives up at once when nothing can run.
fn impatient() -> Runtime {
    let backend = SimBackend::new(MachineConfig::seed(1).timeout(Duration::ZERO)).unwrap();
    Context::with_backends(vec![Arc::new(backend)])
        .runtime(DeviceId::new(BackendKind::Sim, 0))
        .unwrap()
}

#[test]
fn a_download_whose_wait_gives_up_does_not_come_later() {
    let runtime = impatient();
    let x = runtime.upload(&[7u8; 1000]).unwrap();
    let stream = runtime.create_stream().unwrap();
    let held = hold(&stream);
    let mut to = vec![1u8; 1000];
    let error = stream.download(&mut to, x.view()).unwrap_err();
    assert!(error.to_string().contains("dead-lock"), "{error}");
    // The call is over: the bytes are the caller's again.
    to.fill(2);
    open(held);
    assert!(stream.synchronize_timeout(LONG).is_err(), "what was given up fails its stream");
    assert!(to.iter().all(|&b| b == 2), "the copy came after its call was over");
    assert_eq!(runtime.to_vec::<u8>(&x).unwrap(), [7; 1000], "another stream is none of it");
}

#[test]
fn an_upload_whose_wait_gives_up_does_not_come_later() {
    let runtime = impatient();
    let x = runtime.upload(&[7u8; 100_000]).unwrap();
    runtime.stream().synchronize().unwrap();
    let stream = runtime.create_stream().unwrap();
    let held = hold(&stream);
    let mut from = vec![1u8; 100_000];
    let error = stream.upload_blocking(x.view(), &from).unwrap_err();
    assert!(error.to_string().contains("dead-lock"), "{error}");
    from.fill(2);
    open(held);
    assert!(stream.synchronize_timeout(LONG).is_err());
    runtime.stream().fill(x.view(), 3u8).unwrap();
    assert_eq!(runtime.to_vec::<u8>(&x).unwrap(), vec![3; 100_000]);
}

#[test]
fn a_download_behind_a_failure_returns_once_the_failed_work_is_over() {
    let runtime = runtime();
    let x = runtime.upload(&[7u8; 1000]).unwrap();
    let stream = runtime.create_stream().unwrap();
    stream
        .host_call("slow to fail", || {
            std::thread::sleep(Duration::from_millis(20));
            Err(Error::state("on purpose"))
        })
        .unwrap();
    let mut to = vec![1u8; 1000];
    assert_eq!(kind(stream.download(&mut to, x.view())), "Fault");
    assert!(
        stream.now().timeline().is_idle(),
        "the call ended before the work that it lent its memory to"
    );
    assert_eq!(to, [1; 1000]);
}

/// Panics at each event that it hears of, and counts them.
struct Panics(Arc<AtomicUsize>);

impl tracing::Subscriber for Panics {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        panic!("a subscriber that panics");
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_subscriber_that_panics_does_not_come_between_a_submission_and_its_memory() {
    let traced = Traced::new(leasehold::cpu::CpuBackend::new()).unwrap();
    let runtime = Context::with_backends(vec![Arc::new(traced)]).runtime(DeviceId::cpu(0)).unwrap();
    let (x, y) = (runtime.upload(&[7u8; 1000]).unwrap(), runtime.alloc(1000).unwrap());
    let (stream, mut to, heard) =
        (runtime.create_stream().unwrap(), vec![1u8; 1000], Arc::default());
    let held = hold(&stream);
    tracing::subscriber::with_default(Panics(Arc::clone(&heard)), || {
        stream.copy(y.view(), x.view()).unwrap();
        assert!(!y.write_timepoint().is_never(), "a write that is under way is not marked");
        open(held);
        stream.download(&mut to, y.view()).unwrap();
    });
    assert!(heard.load(Ordering::Relaxed) >= 2);
    assert_eq!(to, [7; 1000]);
}

#[test]
fn a_download_into_a_vector_uses_its_room_again_and_leaves_it_empty_after_an_error() {
    let runtime = runtime();
    let (long, short) =
        (runtime.upload(&[1u32; 1000]).unwrap(), runtime.upload(&[2u32; 10]).unwrap());
    let mut values = vec![9u32; 3];
    runtime.stream().download_into(&mut values, long.view()).unwrap();
    assert_eq!(values, [1; 1000]);
    let room = (values.as_ptr(), values.capacity());
    runtime.stream().download_into(&mut values, short.view()).unwrap();
    assert_eq!(values, [2; 10]);
    runtime.stream().download_into(&mut values, short.part(4..12).unwrap().view()).unwrap();
    assert_eq!((&values[..], (values.as_ptr(), values.capacity())), (&[2, 2][..], room));
    runtime.stream().download_into(&mut values, short.part(..0).unwrap().view()).unwrap();
    assert!(values.is_empty());

    values.push(5);
    let odd = short.part(..7).unwrap();
    assert_eq!(kind(runtime.stream().download_into(&mut values, odd.view())), "InvalidArgument");
    assert!(values.is_empty(), "what was there is gone");
    poison(runtime.stream());
    assert_eq!(kind(runtime.stream().download_into(&mut values, short.view())), "Fault");
    assert_eq!((values.len(), values.capacity()), (0, room.1));
}

#[test]
fn values_without_a_size_are_no_bytes() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32; 4]).unwrap();
    assert_eq!(kind(runtime.to_vec::<[u32; 0]>(x.view())), "InvalidArgument");
    assert!(runtime.to_vec::<[u32; 0]>(x.part(..0).unwrap()).unwrap().is_empty());
}
