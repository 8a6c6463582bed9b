//! Scenarios: addresses, physical memory and mappings.

use super::{CopyKind, Scenario, Trace};
use leasehold_core::Result;
use leasehold_cuda::driver::ops::{NativeCopy, NativeFill, NativeMemory};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("addresses", addresses),
    Scenario::new("physical_memory", physical_memory),
    Scenario::new("mappings", mappings),
    Scenario::new("mapping_misuse", mapping_misuse),
    Scenario::new("mapped_twice", mapped_twice),
    Scenario::new("mapped_without_access", mapped_without_access),
    Scenario::new("unmapped_ranges", unmapped_ranges),
];

fn addresses(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let granularity = ops.granularity(0)?;
    t.say(format!("a granule of 2 MiB: {}", granularity == 2 << 20));
    t.tell("granularity of device 999", ops.granularity(999).map(drop));
    t.tell("reserve nothing", ops.address_reserve(0, 0));
    t.tell("reserve half a granule", ops.address_reserve(granularity / 2, 0));
    t.tell("reserve with an odd alignment", ops.address_reserve(granularity, 3));
    let Some(at) = t.tell("reserve", ops.address_reserve(4 * granularity, 0)) else {
        return Ok(());
    };
    t.say(format!("aligned to a granule: {}", at.is_multiple_of(granularity)));
    t.tell("give half of it back", ops.address_free(at, 2 * granularity));
    t.tell("give the second half back", ops.address_free(at + 2 * granularity, 2 * granularity));
    t.tell("give it back", ops.address_free(at, 4 * granularity));
    t.tell("give it back again", ops.address_free(at, 4 * granularity));
    let aligned = t.tell("reserve aligned to 1 GiB", ops.address_reserve(granularity, 1 << 30));
    if let Some(at) = aligned {
        t.say(format!("it is: {}", at.is_multiple_of(1 << 30)));
        t.tell("give it back", ops.address_free(at, granularity));
    }
    Ok(())
}

fn physical_memory(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let granularity = ops.granularity(0)?;
    t.tell("create nothing", ops.memory_create(0, 0));
    t.tell("create half a granule", ops.memory_create(0, granularity / 2));
    t.tell("create on device 999", ops.memory_create(999, granularity));
    t.tell("create too much", ops.memory_create(0, 1 << 50));
    let Some(memory) = t.tell("create", ops.memory_create(0, granularity)) else { return Ok(()) };
    t.tell("release", ops.memory_release(memory));
    t.tell("release nothing", ops.memory_release(NativeMemory::NULL));
    Ok(())
}

fn mappings(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (granularity, stream) = (ops.granularity(0)?, t.stream()?);
    let at = ops.address_reserve(4 * granularity, 0)?;
    let (one, two) = (ops.memory_create(0, granularity)?, ops.memory_create(0, granularity)?);
    t.tell("map", ops.map(at, granularity, one));
    t.tell("map the next", ops.map(at + granularity, granularity, two));
    t.tell("let device 0 reach both", ops.set_access(at, 2 * granularity, &[0]));
    t.tell("release a mapped memory", ops.memory_release(one));
    // A range over two physical pieces is one range.
    let words = granularity / 2;
    // SAFETY: mapped until the stream was waited for.
    t.tell("fill both", unsafe {
        ops.fill(stream, &NativeFill { dst: at, value: 6, width: 4, count: words })
    });
    t.say_data("at the border", stream, at + granularity - 8, 4)?;
    t.tell("unmap both at once", ops.unmap(at, 2 * granularity));
    t.tell("map the second again, elsewhere", ops.map(at + 3 * granularity, granularity, two));
    t.tell("let device 0 reach it", ops.set_access(at + 3 * granularity, granularity, &[0]));
    t.say_data("it kept its bytes", stream, at + 3 * granularity, 2)?;
    t.tell("give addresses back with something mapped", ops.address_free(at, 4 * granularity));
    t.tell("unmap", ops.unmap(at + 3 * granularity, granularity));
    t.tell("release", ops.memory_release(two));
    t.tell("give addresses back", ops.address_free(at, 4 * granularity));
    ops.stream_destroy(stream)
}

fn mapping_misuse(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let granularity = ops.granularity(0)?;
    let at = ops.address_reserve(4 * granularity, 0)?;
    let memory = ops.memory_create(0, 2 * granularity)?;
    t.tell("map where nothing is reserved", ops.map(0x1000, 2 * granularity, memory));
    t.tell("map beyond the end", ops.map(at + 3 * granularity, 2 * granularity, memory));
    t.tell("map at half a granule", ops.map(at + granularity / 2, 2 * granularity, memory));
    t.tell("map more than there is", ops.map(at, 3 * granularity, memory));
    t.tell("map half a granule of it", ops.map(at, granularity / 2, memory));
    t.tell("map no memory", ops.map(at, granularity, NativeMemory::NULL));
    t.tell("access to what is not mapped", ops.set_access(at, granularity, &[0]));
    t.tell("map", ops.map(at, 2 * granularity, memory));
    t.tell("access for device 999", ops.set_access(at, 2 * granularity, &[999]));
    let other = ops.memory_create(0, granularity)?;
    t.tell("map over it", ops.map(at + granularity, granularity, other));
    t.tell("unmap half of it", ops.unmap(at, granularity));
    t.tell("unmap more than it", ops.unmap(at, 3 * granularity));
    t.tell("unmap", ops.unmap(at, 2 * granularity));
    t.tell("unmap again", ops.unmap(at, 2 * granularity));
    ops.memory_release(other)?;
    ops.memory_release(memory)?;
    ops.address_free(at, 4 * granularity)
}

fn mapped_twice(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (granularity, stream) = (ops.granularity(0)?, t.stream()?);
    let at = ops.address_reserve(2 * granularity, 0)?;
    let memory = ops.memory_create(0, granularity)?;
    t.tell("map", ops.map(at, granularity, memory));
    t.tell("map elsewhere too", ops.map(at + granularity, granularity, memory));
    t.tell("let device 0 reach both", ops.set_access(at, 2 * granularity, &[0]));
    // SAFETY: mapped until the stream was waited for.
    t.tell("fill one", unsafe {
        ops.fill(stream, &NativeFill { dst: at, value: 8, width: 4, count: 2 })
    });
    t.say_data("the other", stream, at + granularity, 2)?;
    t.tell("unmap one", ops.unmap(at, granularity));
    t.say_data("the other", stream, at + granularity, 2)?;
    t.tell("unmap the other", ops.unmap(at + granularity, granularity));
    ops.memory_release(memory)?;
    ops.address_free(at, 2 * granularity)?;
    ops.stream_destroy(stream)
}

fn mapped_without_access(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (granularity, stream) = (ops.granularity(0)?, t.stream()?);
    let at = ops.address_reserve(granularity, 0)?;
    let memory = ops.memory_create(0, granularity)?;
    ops.map(at, granularity, memory)?;
    // SAFETY: the memory is mapped. The driver is to refuse the access.
    t.tell("fill", unsafe {
        ops.fill(stream, &NativeFill { dst: at, value: 8, width: 4, count: 2 })
    });
    t.tell("wait", t.sync(stream));
    let down = NativeCopy::linear(CopyKind::DeviceToHost, t.word_at(8), at, 8);
    // SAFETY: both ranges live until the wait in the next line.
    t.tell("copy", unsafe { ops.copy(stream, &down) });
    t.tell("wait", t.sync(stream));
    t.tell("unmap", ops.unmap(at, granularity));
    t.tell("release", ops.memory_release(memory));
    t.tell("give addresses back", ops.address_free(at, granularity));
    t.tell("going on", ops.alloc(256).and_then(|at| ops.free(at)));
    Ok(())
}

fn unmapped_ranges(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (granularity, stream) = (ops.granularity(0)?, t.stream()?);
    let at = ops.address_reserve(granularity, 0)?;
    // SAFETY: nothing is mapped. The driver is to refuse the access.
    t.tell("fill", unsafe {
        ops.fill(stream, &NativeFill { dst: at, value: 8, width: 4, count: 2 })
    });
    t.tell("wait", t.sync(stream));
    t.tell("free it as plain memory", ops.free(at));
    ops.address_free(at, granularity)?;
    ops.stream_destroy(stream)
}
