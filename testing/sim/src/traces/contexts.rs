//! Scenarios: the driver, devices, contexts, peers.

use super::{Scenario, Trace};
use leasehold_core::Result;
use leasehold_cuda::driver::ops::NativeContext;

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("devices", devices),
    Scenario::new("primary_context", primary_context),
    Scenario::new("no_current_context", no_current_context),
    Scenario::new("owned_context", owned_context),
    Scenario::new("context_of_two_threads", context_of_two_threads),
    Scenario::new("peers", peers).on_devices(2),
    Scenario::new("peer_with_itself", peer_with_itself),
];

fn devices(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.tell("properties of device 999", ops.device_properties(999).map(drop));
    t.tell("retain device 999", ops.primary_retain(999));
    t.tell("release device 999", ops.primary_release(999));
    t.tell("own context on device 999", ops.context_create(999));
    t.tell("can device 0 reach itself", ops.can_access_peer(0, 0));
    t.tell("can device 0 reach device 999", ops.can_access_peer(0, 999));
    t.tell("init again", ops.init());
    let properties = ops.device_properties(0)?;
    t.say(format!("block limits {:?} of {} threads", properties.block, properties.block_threads));
    t.say(format!("grid limits {:?}, warp of {}", properties.grid, properties.warp));
    t.say(format!("unified addressing {}", properties.unified_addressing));
    Ok(())
}

fn primary_context(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.tell("release without a retain", ops.primary_release(0));
    t.tell("current at first", ops.current());
    let first = ops.primary_retain(0)?;
    t.tell("current after a retain", ops.current());
    let second = ops.primary_retain(0)?;
    t.say(format!("the same context twice: {}", first == second));
    t.tell("make it current", ops.set_current(first));
    let current = ops.current()?;
    t.say(format!("it is current: {}", current == first));
    t.tell("alloc", ops.alloc(256)).map(|at| ops.free(at));
    t.tell("release once", ops.primary_release(0));
    let at = t.tell("alloc after one of two releases", ops.alloc(256));
    if let Some(at) = at {
        t.tell("free", ops.free(at));
    }
    t.tell("destroy a primary context as if it were one's own", ops.context_destroy(first));
    t.tell("priorities", ops.priority_range().map(|(least, greatest)| greatest <= least));
    t.tell("synchronize", ops.context_synchronize());
    t.tell("make none current", ops.set_current(NativeContext::NULL));
    t.tell("release the last", ops.primary_release(0));
    t.tell("release once too often", ops.primary_release(0));
    Ok(())
}

fn no_current_context(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.tell("alloc", ops.alloc(256));
    t.tell("pinned", ops.host_alloc(256, super::HostFlags::default()));
    t.tell("memory info", ops.memory_info().map(drop));
    t.tell("stream", ops.stream_create(0));
    t.tell("event", t.event());
    t.tell("module", ops.module_load(super::kernels::PTX.as_bytes()));
    t.tell("synchronize", ops.context_synchronize());
    t.tell("priorities", ops.priority_range().map(drop));
    let primary = ops.primary_retain(0)?;
    t.tell("enable a peer", ops.enable_peer(primary));
    t.tell("alloc with a context that is not current", ops.alloc(256));
    ops.primary_release(0)
}

fn owned_context(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let primary = t.context;
    let Some(own) = t.tell("create", ops.context_create(0)) else { return Ok(()) };
    t.say(format!("it is another one: {}", own != primary));
    let current = ops.current()?;
    t.say(format!("the primary one is still current: {}", current == primary));
    t.tell("make it current", ops.set_current(own));
    let at = ops.alloc(256)?;
    let stream = ops.stream_create(0)?;
    t.tell("query its stream", ops.stream_query(stream));
    t.tell("synchronize", ops.context_synchronize());
    ops.set_current(primary)?;
    t.tell("destroy it with memory and a stream", ops.context_destroy(own));
    t.tell("free its memory from another context", ops.free(at));
    let own = ops.context_create(0)?;
    ops.set_current(own)?;
    t.tell("destroy a context that is current", ops.context_destroy(own));
    let current = ops.current()?;
    t.say(format!(
        "what is current then: {}",
        if current.is_null() { "nothing" } else { "something" }
    ));
    t.tell("alloc then", ops.alloc(256));
    ops.set_current(primary)
}

fn context_of_two_threads(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let context = t.context;
    let other = std::thread::scope(|scope| {
        let other = scope.spawn(move || {
            let at_first = ops.current().map(|c| c.is_null());
            let alloc = ops.alloc(256);
            let set = ops.set_current(context);
            let after = ops.alloc(256);
            let freed = after.as_ref().map_or(Ok(()), |&at| ops.free(at));
            (at_first, alloc, set, after, freed)
        });
        other.join().map_err(|_| leasehold_core::Error::state("the thread panicked"))
    });
    let (at_first, alloc, set, after, freed) = other?;
    t.tell("on another thread nothing is current", at_first);
    t.tell("alloc there", alloc);
    t.tell("make it current there", set);
    t.tell("alloc there then", after);
    t.tell("free there", freed);
    Ok(())
}

fn peers(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let here = t.context;
    let there = ops.primary_retain(1)?;
    t.tell("can device 0 reach device 1", ops.can_access_peer(0, 1));
    t.tell("enable", ops.enable_peer(there));
    t.tell("enable again", ops.enable_peer(there));
    let stream = t.stream()?;
    let mine = t.filled(stream, 4, 7)?;
    ops.set_current(there)?;
    let far_stream = t.stream()?;
    let far = t.filled(far_stream, 4, 9)?;
    t.tell("disable what was not enabled", ops.disable_peer(here));
    ops.set_current(here)?;
    // SAFETY: both ranges live until the stream was waited for.
    let copied = unsafe { ops.copy_peer(stream, (mine, here), (far, there), 16) };
    t.tell("copy from the peer", copied);
    t.say_data("data", stream, mine, 4)?;
    let copy = super::NativeCopy::linear(super::CopyKind::DeviceToDevice, far, mine, 8);
    // SAFETY: both ranges live until the wait in the next line.
    t.tell("a plain copy to the peer", unsafe { ops.copy(stream, &copy) });
    t.tell("wait", t.sync(stream));
    t.tell("disable", ops.disable_peer(there));
    t.tell("disable again", ops.disable_peer(there));
    // SAFETY: both ranges live until the wait in the next line, and lie in the memory of the named
    // contexts.
    t.tell("copy from a peer that is not enabled", unsafe {
        ops.copy_peer(stream, (mine, here), (far, there), 16)
    });
    t.tell("wait", t.sync(stream));
    let event = t.event()?;
    ops.set_current(there)?;
    t.tell("record an event of another device's context", ops.event_record(event, far_stream));
    ops.set_current(here)?;
    t.tell("record it on its own", ops.event_record(event, stream));
    ops.set_current(there)?;
    t.tell("wait for it on the other device", ops.stream_wait_event(far_stream, event));
    t.tell("wait", t.sync(far_stream));
    t.tell("free", ops.free(far));
    t.tell("destroy the stream", ops.stream_destroy(far_stream));
    ops.set_current(here)?;
    t.tell("destroy the event", ops.event_destroy(event));
    t.tell("destroy the stream", ops.stream_destroy(stream));
    t.tell("free", ops.free(mine));
    ops.primary_release(1)
}

fn peer_with_itself(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    t.tell("enable oneself", ops.enable_peer(t.context));
    t.tell("disable oneself", ops.disable_peer(t.context));
    t.tell("enable no context", ops.enable_peer(NativeContext::NULL));
    Ok(())
}
