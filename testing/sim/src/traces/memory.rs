//! Scenarios: device memory, stream-ordered memory, pinned and registered host memory, exhaustion.

use super::{HostFlags, Scenario, Trace};
use leasehold_core::Result;

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("device_memory", device_memory),
    Scenario::new("device_memory_misuse", device_memory_misuse),
    Scenario::new("stream_ordered_memory", stream_ordered_memory),
    Scenario::new("stream_ordered_misuse", stream_ordered_misuse),
    Scenario::new("pinned_memory", pinned_memory),
    Scenario::new("registered_memory", registered_memory),
    Scenario::new("out_of_memory", out_of_memory),
];

impl Trace<'_> {
    fn register(&self, at: u64, bytes: u64) -> Result<()> {
        // SAFETY: scenarios register memory that lives until they end, and unregister it before.
        // The driver refuses addresses without memory.
        unsafe { self.ops.host_register(at, bytes) }
    }
}

/// A size beyond the memory of any device.
const TOO_MUCH: u64 = 1 << 50;

fn device_memory(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    t.tell("alloc of nothing", ops.alloc(0));
    let one = ops.alloc(1)?;
    let two = ops.alloc(1)?;
    t.say(format!("aligned to 256: {} {}", one.is_multiple_of(256), two.is_multiple_of(256)));
    t.say(format!("at least 512 apart: {}", one.abs_diff(two) >= 512));
    t.tell("free", ops.free(one));
    t.tell("free", ops.free(two));
    t.tell("free null", ops.free(0));
    let before = ops.memory_info()?;
    t.say(format!("free is at most total: {}", before.free <= before.total));
    let properties = ops.device_properties(0)?;
    t.say(format!("total is the device's memory: {}", properties.memory == before.total));
    Ok(())
}

fn device_memory_misuse(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let at = ops.alloc(4096)?;
    t.tell("free inside", ops.free(at + 256));
    t.tell("free", ops.free(at));
    t.tell("free again", ops.free(at));
    t.tell("free an address of nothing", ops.free(0x1000));
    t.tell("free pinned memory as device memory", ops.free(t.words));
    let host = [0_u64; 64];
    t.tell("free pageable memory as device memory", ops.free(host.as_ptr() as u64));
    t.tell("alloc still works", ops.alloc(256)).map(|at| ops.free(at));
    Ok(())
}

fn stream_ordered_memory(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    t.tell("alloc of nothing", ops.alloc_async(0, stream));
    let Some(at) = t.tell("alloc", ops.alloc_async(4096, stream)) else { return Ok(()) };
    let fill = leasehold_cuda::driver::ops::NativeFill { dst: at, value: 5, width: 4, count: 4 };
    // SAFETY: the memory lives until it is freed in the order of this stream.
    t.tell("fill in its order", unsafe { ops.fill(stream, &fill) });
    t.say_data("data", stream, at, 4)?;
    t.tell("free", ops.free_async(at, stream));
    t.tell("wait", t.sync(stream));
    t.tell("keep at most nothing", ops.pool_set_threshold(0, 0));
    t.tell("trim", ops.pool_trim(0, 0));
    t.tell("threshold of device 999", ops.pool_set_threshold(999, 0));
    let at = ops.alloc_async(4096, stream)?;
    t.tell("wait", t.sync(stream));
    t.tell("free as plain memory", ops.free(at));
    // The stream is held back, so that only its order matters.
    t.hold(stream, 0)?;
    let at = ops.alloc_async(4096, stream)?;
    t.tell("alloc behind held work", Ok(()));
    t.tell("free behind held work", ops.free_async(at, stream));
    t.tell("query", ops.stream_query(stream));
    t.release(0);
    t.tell("wait", t.sync(stream));
    t.tell("query", ops.stream_query(stream));
    ops.stream_destroy(stream)
}

fn stream_ordered_misuse(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let at = ops.alloc_async(4096, stream)?;
    t.sync(stream)?;
    t.tell("free", ops.free_async(at, stream));
    t.tell("free again", ops.free_async(at, stream));
    t.tell("wait", t.sync(stream));
    t.tell("free after that", ops.free_async(at, stream));
    t.tell("free null", ops.free_async(0, stream));
    let plain = ops.alloc(4096)?;
    t.tell("free plain memory in stream order", ops.free_async(plain, stream));
    t.tell("wait", t.sync(stream));
    t.tell("free it plainly then", ops.free(plain));
    t.tell("too much", ops.alloc_async(TOO_MUCH, stream));
    t.tell("going on", ops.alloc_async(256, stream)).map(|at| ops.free_async(at, stream));
    t.sync(stream)?;
    ops.stream_destroy(stream)
}

fn pinned_memory(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    t.tell("pin nothing", ops.host_alloc(0, HostFlags::default()));
    let at = ops.host_alloc(100, HostFlags::default())?;
    t.say(format!("aligned to a page: {}", at.is_multiple_of(4096)));
    t.tell("free inside", ops.host_free(at + 8));
    t.tell("unregister it", ops.host_unregister(at));
    t.tell("register it too", t.register(at, 100));
    t.tell("free", ops.host_free(at));
    t.tell("free again", ops.host_free(at));
    t.tell("free null", ops.host_free(0));
    t.tell("write-combined", ops.host_alloc(100, HostFlags { write_combined: true }))
        .map(|at| ops.host_free(at));
    let device = ops.alloc(256)?;
    t.tell("free device memory as pinned", ops.host_free(device));
    t.tell("free it", ops.free(device));
    t.tell("too much", ops.host_alloc(TOO_MUCH, HostFlags::default()));
    Ok(())
}

fn registered_memory(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    // Whole pages, so that they contain no other object's memory.
    let memory = vec![0_u8; 5 * 4096];
    let at = (memory.as_ptr() as u64).next_multiple_of(4096);
    t.tell("register nothing", t.register(at, 0));
    t.tell("register null", t.register(0, 4096));
    t.tell("register", t.register(at, 8192));
    t.tell("register again", t.register(at, 8192));
    t.tell("register an overlapping range", t.register(at + 4096, 8192));
    t.tell("register the next pages", t.register(at + 8192, 4096));
    t.tell("unregister inside", ops.host_unregister(at + 4096));
    t.tell("free it as pinned memory", ops.host_free(at));
    t.tell("unregister the next pages", ops.host_unregister(at + 8192));
    t.tell("unregister", ops.host_unregister(at));
    t.tell("unregister again", ops.host_unregister(at));
    t.tell("unregister null", ops.host_unregister(0));
    t.tell("register at an odd address", t.register(at + 1, 100));
    t.tell("unregister there", ops.host_unregister(at + 1));
    drop(memory);
    Ok(())
}

fn out_of_memory(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let granularity = ops.granularity(0)?;
    // Slightly more than half, so that two such pieces exceed the memory even without the driver's
    // own use.
    let half = (ops.memory_info()?.total / 2 + granularity).next_multiple_of(granularity);
    t.tell("far too much", ops.alloc(TOO_MUCH));
    let first = ops.alloc(half)?;
    t.say("half of the memory is ours");
    t.tell("a second half", ops.alloc(half));
    t.tell("a little", ops.alloc(256)).map(|at| ops.free(at));
    t.tell("free the half", ops.free(first));
    let again = t.tell("half again", ops.alloc(half));
    if let Some(at) = again {
        t.tell("free", ops.free(at));
    }
    let first = ops.memory_create(0, half)?;
    t.tell("a second half as physical memory", ops.memory_create(0, half));
    t.tell("release the first", ops.memory_release(first));
    t.tell("half again", ops.memory_create(0, half)).map(|memory| ops.memory_release(memory));
    Ok(())
}
