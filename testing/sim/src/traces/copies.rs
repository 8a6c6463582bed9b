//! Scenarios: copies and fills.

use super::{CopyKind, Scenario, Trace};
use leasehold_core::Result;
use leasehold_cuda::driver::ops::{NativeCopy, NativeFill, NativeStream};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("pageable_copies", pageable_copies),
    Scenario::new("pinned_copies", pinned_copies),
    Scenario::new("copies_of_nothing", copies_of_nothing),
    Scenario::new("copies_in_rows", copies_in_rows),
    Scenario::new("copy_misuse", copy_misuse),
    Scenario::new("fills", fills),
    Scenario::new("fill_misuse", fill_misuse),
];

impl Trace<'_> {
    /// Makes a copy. Both ranges live until the scenario's end or the wait for its streams.
    fn copied(&self, stream: NativeStream, copy: NativeCopy) -> Result<()> {
        // SAFETY: scenarios keep both ranges, or ask for a refusal by the driver.
        unsafe { self.ops.copy(stream, &copy) }
    }

    fn fill(
        &self,
        stream: NativeStream,
        dst: u64,
        value: u32,
        width: u8,
        count: u64,
    ) -> Result<()> {
        // SAFETY: the range lives until the scenario has waited for the stream.
        unsafe { self.ops.fill(stream, &NativeFill { dst, value, width, count }) }
    }
}

fn pageable_copies(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let device = t.filled(stream, 4, 0)?;
    let mut source = [1_u32, 2, 3, 4];
    let up = NativeCopy::linear(CopyKind::HostToDevice, device, source.as_ptr() as u64, 16);
    t.tell("upload", t.copied(stream, up));
    source.fill(99);
    t.say_data("after the source was changed", stream, device, 4)?;
    let mut target = [0_u32; 4];
    let down = NativeCopy::linear(CopyKind::DeviceToHost, target.as_mut_ptr() as u64, device, 16);
    t.tell("download", t.copied(stream, down));
    // The read goes through a pointer, because the compiler does not know that the copy wrote.
    // SAFETY: four words that live.
    let seen = unsafe { std::ptr::read_volatile(target.as_ptr().cast::<[u32; 4]>()) };
    t.say(format!("without waiting: {seen:?}"));
    t.tell("query", ops.stream_query(stream));
    ops.free(device)?;
    ops.stream_destroy(stream)
}

fn pinned_copies(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let device = ops.alloc(64)?;
    for word in 8..16 {
        t.set_word(word, word);
    }
    t.hold(stream, 0)?;
    let up = NativeCopy::linear(CopyKind::HostToDevice, device, t.word_at(8), 64);
    t.tell("upload behind held work", t.copied(stream, up));
    let down = NativeCopy::linear(CopyKind::DeviceToHost, t.word_at(16), device, 64);
    t.tell("download behind it", t.copied(stream, down));
    t.tell("query", ops.stream_query(stream));
    t.say(format!("nothing has arrived: {}", t.word(16)));
    // A copy from pinned memory reads the memory when it runs.
    t.set_word(8, 77);
    t.release(0);
    t.tell("wait", t.sync(stream));
    t.say(format!("arrived: {} {} {}", t.word(16), t.word(17), t.word(23)));
    let half = NativeCopy::linear(CopyKind::DeviceToDevice, device, device + 32, 32);
    t.tell("within the device", t.copied(stream, half));
    let down = NativeCopy::linear(CopyKind::DeviceToHost, t.word_at(16), device, 64);
    t.copied(stream, down)?;
    t.tell("wait", t.sync(stream));
    t.say(format!("moved: {} {}", t.word(16), t.word(20)));
    ops.free(device)?;
    ops.stream_destroy(stream)
}

fn copies_of_nothing(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let device = ops.alloc(64)?;
    let host = t.word_at(8);
    t.tell("upload", t.copied(stream, NativeCopy::linear(CopyKind::HostToDevice, device, host, 0)));
    t.tell(
        "download",
        t.copied(stream, NativeCopy::linear(CopyKind::DeviceToHost, host, device, 0)),
    );
    t.tell(
        "within the device",
        t.copied(stream, NativeCopy::linear(CopyKind::DeviceToDevice, device, device, 0)),
    );
    t.tell("from null", t.copied(stream, NativeCopy::linear(CopyKind::HostToDevice, device, 0, 0)));
    let rows = |width, rows| NativeCopy {
        src: device,
        src_pitch: 16,
        dst: device + 32,
        dst_pitch: 16,
        width,
        rows,
        kind: CopyKind::DeviceToDevice,
    };
    t.tell("no rows", t.copied(stream, rows(8, 0)));
    t.tell("two rows of nothing", t.copied(stream, rows(0, 2)));
    t.tell("fill", t.fill(stream, device, 0, 1, 0));
    t.tell("wait", t.sync(stream));
    ops.free(device)?;
    ops.stream_destroy(stream)
}

fn copies_in_rows(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let device = t.filled(stream, 16, 0)?;
    let source: Vec<u32> = (1..=16).collect();
    let block = |kind, dst, dst_pitch, src, src_pitch, width| NativeCopy {
        src,
        src_pitch,
        dst,
        dst_pitch,
        width,
        rows: 3,
        kind,
    };
    // Three rows of two words, from rows of four words, into rows of five.
    let up = block(CopyKind::HostToDevice, device, 20, source.as_ptr() as u64, 16, 8);
    t.tell("upload", t.copied(stream, up));
    t.say_data("data", stream, device, 16)?;
    let down = block(CopyKind::DeviceToHost, t.word_at(8), 8, device, 20, 8);
    t.tell("download", t.copied(stream, down));
    t.tell("wait", t.sync(stream));
    t.say(format!("{:#x} {:#x} {:#x}", t.word(8), t.word(9), t.word(10)));
    let narrow = block(CopyKind::DeviceToHost, t.word_at(8), 4, device, 20, 8);
    t.tell("a pitch that is smaller than a row", t.copied(stream, narrow));
    let within = block(CopyKind::DeviceToDevice, device + 48, 4, device, 20, 4);
    t.tell("within the device, touching rows", t.copied(stream, within));
    t.say_data("data", stream, device, 16)?;
    ops.free(device)?;
    ops.stream_destroy(stream)
}

fn copy_misuse(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let device = ops.alloc(4096)?;
    let host = t.word_at(8);
    t.tell("to null", t.copied(stream, NativeCopy::linear(CopyKind::HostToDevice, 0, host, 8)));
    t.tell("from null", t.copied(stream, NativeCopy::linear(CopyKind::DeviceToHost, host, 0, 8)));
    t.tell(
        "to an address of nothing",
        t.copied(stream, NativeCopy::linear(CopyKind::HostToDevice, 0x1000, host, 8)),
    );
    t.tell("wait", t.sync(stream));
    ops.free(device)?;
    t.tell(
        "from freed memory",
        t.copied(stream, NativeCopy::linear(CopyKind::DeviceToHost, host, device, 8)),
    );
    t.tell("wait", t.sync(stream));
    ops.stream_destroy(stream)
}

fn fills(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let device = t.filled(stream, 4, 0)?;
    t.tell("three bytes", t.fill(stream, device + 1, 0xabcd_ef11, 1, 3));
    t.say_data("data", stream, device, 4)?;
    t.tell("three halves", t.fill(stream, device + 2, 0xabcd_2233, 2, 3));
    t.say_data("data", stream, device, 4)?;
    t.tell("a word", t.fill(stream, device + 12, 0x4455_6677, 4, 1));
    t.say_data("data", stream, device, 4)?;
    t.tell("a width of three", t.fill(stream, device, 0, 3, 1));
    // Pinned memory counts as memory of the device too.
    t.tell("pinned memory", t.fill(stream, t.word_at(8), 0x0101_0101, 4, 2));
    t.tell("wait", t.sync(stream));
    t.say(format!("{:#x}", t.word(8)));
    ops.free(device)?;
    ops.stream_destroy(stream)
}

fn fill_misuse(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let device = ops.alloc(4096)?;
    t.tell("halves at an odd address", t.fill(stream, device + 1, 0, 2, 1));
    t.tell("words at an even address", t.fill(stream, device + 2, 0, 4, 1));
    t.tell("null", t.fill(stream, 0, 0, 1, 1));
    t.tell("an address of nothing", t.fill(stream, 0x1000, 0, 1, 1));
    let host = [0_u64; 8];
    t.tell("pageable memory", t.fill(stream, host.as_ptr() as u64, 0, 1, 8));
    ops.free(device)?;
    t.tell("freed memory", t.fill(stream, device, 0, 1, 16));
    t.tell("wait", t.sync(stream));
    ops.stream_destroy(stream)
}
