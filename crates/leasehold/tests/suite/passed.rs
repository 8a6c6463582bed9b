//! Work that a failure cuts short: failed work is over before the work that it was to wait for.

use crate::between::World;
use crate::common::*;
use leasehold::{Buffer, Error, HostTimeline, Lease, Runtime, Stream, View};
use std::time::Instant;

/// A buffer that a stream is yet to fill with ones, behind a host timeline. Another stream was to
/// overwrite it after that, and failed.
struct Scene {
    host_timeline: HostTimeline,
    writer: Stream,
    failed: Stream,
    buffer: Lease<Buffer>,
}

fn scene(runtime: &Runtime) -> Scene {
    let [writer, failed] = [(); 2].map(|()| runtime.create_stream().unwrap());
    let [host_timeline, broken] = [(); 2].map(|()| runtime.create_host_timeline().unwrap());
    let buffer = writer.runtime().alloc(1 << 20).unwrap();
    writer.wait(host_timeline.next()).unwrap();
    writer.fill(buffer.view(), 1u8).unwrap();
    failed.wait(broken.next()).unwrap();
    failed.fill(buffer.view(), 2u8).unwrap();
    broken.fail(Error::state("broken"));
    let (end, last) = (Instant::now() + LONG, failed.now());
    while last.timeline().completed() < last.value() {
        // A failure shows in the timeline.
        let _ = failed.query();
        assert!(Instant::now() < end, "{last:?} is not over");
    }
    assert!(!last.has_passed() && !last.is_settled());
    Scene { host_timeline, writer, failed, buffer }
}

/// A stream that overwrites the buffer comes after the writer that still runs. The stream fails, as
/// any work does that comes after failed work which still runs.
#[test]
fn who_overwrites_what_failed_comes_after_all_that_the_failed_one_came_after() {
    let world = World::new(11);
    for name in ["cpu:0", "sim:0", "cuda:0"] {
        let runtime = world.runtime(name);
        let Scene { host_timeline, writer, failed, buffer } = scene(&runtime);
        let early = runtime.create_stream().unwrap();
        let filled = early.fill(buffer.view(), 3u8);
        assert!(
            filled.and_then(|()| early.synchronize_timeout(LONG)).is_err(),
            "{name}: nothing waits for the first"
        );
        host_timeline.signal(host_timeline.next().value()).unwrap();
        writer.synchronize_timeout(LONG).unwrap();
        assert!(failed.synchronize_timeout(LONG).is_err());
        assert!(failed.now().has_passed(), "{name}");
        let late = runtime.create_stream().unwrap();
        late.fill(buffer.view(), 4u8).unwrap();
        late.synchronize_timeout(LONG).unwrap();
        assert!(runtime.to_vec::<u8>(&buffer).unwrap().iter().all(|&b| b == 4), "{name}");
    }
    world.check();
}

#[test]
fn memory_is_not_lent_again_while_what_the_failed_one_came_after_still_runs() {
    let world = World::new(12);
    for name in ["cpu:0", "sim:0", "cuda:0"] {
        let runtime = world.runtime(name);
        let Scene { host_timeline, writer, failed, buffer } = scene(&runtime);
        drop(buffer);
        let other = runtime.create_stream().unwrap();
        let next = other.runtime().alloc(1 << 20).unwrap();
        other.fill(next.view(), 5u8).unwrap();
        other.synchronize_timeout(LONG).unwrap();
        host_timeline.signal(host_timeline.next().value()).unwrap();
        writer.synchronize_timeout(LONG).unwrap();
        assert!(runtime.to_vec::<u8>(&next).unwrap().iter().all(|&b| b == 5), "{name}");
        assert!(failed.synchronize_timeout(LONG).is_err());
    }
    world.check();
}
