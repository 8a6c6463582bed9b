//! Scenarios: streams, words, events, host functions, and the order of completion.

use super::{Order, Scenario, Trace};
use leasehold_core::Result;
use leasehold_cuda::driver::ops::{EventFlags, NativeEvent, NativeStream};
use std::sync::Arc;

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("streams", streams),
    Scenario::new("stream_destroyed_with_work", stream_destroyed_with_work),
    Scenario::new("words", words),
    Scenario::new("word_misuse", word_misuse),
    Scenario::new("events", events),
    Scenario::new("event_binds_to_the_last_record", event_binds_to_the_last_record),
    Scenario::new("event_destroyed_while_awaited", event_destroyed_while_awaited),
    Scenario::new("event_times", event_times),
    Scenario::new("host_functions", host_functions),
    Scenario::new("order_of_three_streams", order_of_three_streams),
    Scenario::new("free_waits", free_waits),
];

fn streams(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (least, greatest) = ops.priority_range()?;
    for (name, priority) in [
        ("default", 0),
        ("greatest", greatest),
        ("beyond it", greatest - 100),
        ("below the least", least + 100),
    ] {
        let stream = t.tell(format!("a stream of priority {name}"), ops.stream_create(priority));
        if let Some(stream) = stream {
            t.tell("query it", ops.stream_query(stream));
            t.tell("wait for it", ops.stream_synchronize(stream));
            t.tell("destroy it", ops.stream_destroy(stream));
        }
    }
    let stream = t.stream()?;
    t.hold(stream, 0)?;
    t.tell("query with held work", ops.stream_query(stream));
    t.tell("query again", ops.stream_query(stream));
    t.release(0);
    t.tell("wait", ops.stream_synchronize(stream));
    t.tell("query", ops.stream_query(stream));
    t.tell("is it captured", ops.is_capturing(stream));
    ops.stream_destroy(stream)
}

fn stream_destroyed_with_work(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (stream, order) = (t.stream()?, Order::default());
    t.hold(stream, 0)?;
    t.mark(stream, &order, "function")?;
    ops.stream_write_word(stream, t.word_at(8), 5)?;
    t.tell("destroy", ops.stream_destroy(stream));
    t.say(format!("before: {}", t.word(8)));
    t.release(0);
    t.tell("wait for the context", ops.context_synchronize());
    t.say(format!("after: {}", t.word(8)));
    t.say_order(&order);
    Ok(())
}

fn words(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, b) = (t.stream()?, t.stream()?);
    t.tell("write", ops.stream_write_word(a, t.word_at(8), 1 << 40));
    t.tell("wait", t.sync(a));
    t.say(format!("{:#x}", t.word(8)));
    t.set_word(9, 7);
    t.tell("wait for what is reached", ops.stream_wait_word(a, t.word_at(9), 7));
    t.tell("wait for less", ops.stream_wait_word(a, t.word_at(9), 3));
    t.tell("synchronize", t.sync(a));
    t.tell("wait for more", ops.stream_wait_word(a, t.word_at(9), 8));
    t.tell("query", ops.stream_query(a));
    t.tell("write from another stream", ops.stream_write_word(b, t.word_at(9), 9));
    t.tell("synchronize", t.sync(a));
    t.tell("synchronize", t.sync(b));
    // Words are written in order, each after the work before it.
    t.hold(a, 0)?;
    ops.stream_write_word(a, t.word_at(10), 1)?;
    ops.stream_write_word(a, t.word_at(10), 2)?;
    t.say(format!("held: {}", t.word(10)));
    t.release(0);
    t.sync(a)?;
    t.say(format!("over: {}", t.word(10)));
    let device = t.filled(a, 4, 0)?;
    t.tell("a word in device memory", ops.stream_write_word(a, device, 0x1_0000_0002));
    t.say_data("data", a, device, 4)?;
    ops.free(device)?;
    ops.stream_destroy(a)?;
    ops.stream_destroy(b)
}

fn word_misuse(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    t.tell("write at an odd address", ops.stream_write_word(stream, t.word_at(8) + 1, 1));
    t.tell("write at half a word", ops.stream_write_word(stream, t.word_at(8) + 4, 1));
    t.tell("wait at half a word", ops.stream_wait_word(stream, t.word_at(8) + 4, 0));
    t.tell("write to null", ops.stream_write_word(stream, 0, 1));
    let host = [0_u64; 8];
    t.tell("write to pageable memory", ops.stream_write_word(stream, host.as_ptr() as u64, 1));
    t.tell("wait for pageable memory", ops.stream_wait_word(stream, host.as_ptr() as u64, 0));
    t.tell("synchronize", t.sync(stream));
    ops.stream_destroy(stream)
}

fn events(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, b) = (t.stream()?, t.stream()?);
    let event = t.event()?;
    t.tell("query what was never recorded", ops.event_query(event));
    t.tell("wait for what was never recorded", ops.event_synchronize(event));
    t.tell("let a stream wait for it", ops.stream_wait_event(a, event));
    t.tell("wait for the stream", t.sync(a));
    t.hold(a, 0)?;
    t.tell("record behind held work", ops.event_record(event, a));
    t.tell("query", ops.event_query(event));
    t.tell("let another stream wait for it", ops.stream_wait_event(b, event));
    t.tell("query that stream", ops.stream_query(b));
    t.release(0);
    t.tell("wait for the event", ops.event_synchronize(event));
    t.tell("query", ops.event_query(event));
    t.tell("wait for that stream", t.sync(b));
    t.tell("record again", ops.event_record(event, a));
    t.tell("wait for the event", ops.event_synchronize(event));
    t.tell("destroy", ops.event_destroy(event));
    for flags in [
        EventFlags { timing: true, blocking: false },
        EventFlags { timing: true, blocking: true },
        EventFlags { timing: false, blocking: true },
    ] {
        let event = ops.event_create(flags)?;
        ops.event_record(event, a)?;
        t.tell(format!("wait for an event with {flags:?}"), ops.event_synchronize(event));
        ops.event_destroy(event)?;
    }
    t.tell("record no event", ops.event_record(NativeEvent::NULL, a));
    ops.stream_destroy(a)?;
    ops.stream_destroy(b)
}

fn event_binds_to_the_last_record(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, b, c) = (t.stream()?, t.stream()?, t.stream()?);
    let event = t.event()?;
    t.hold(a, 0)?;
    ops.event_record(event, a)?;
    ops.stream_wait_event(b, event)?;
    // The event is recorded again on a stream that is not held back. A stream that waited before
    // still waits for the first record.
    t.tell("record again elsewhere", ops.event_record(event, c));
    t.tell("wait for the event", ops.event_synchronize(event));
    t.tell("query the event", ops.event_query(event));
    t.tell("query who waited before", ops.stream_query(b));
    t.release(0);
    t.tell("wait for who waited", t.sync(b));
    // The reverse: the event is recorded again on a stream that is held back. A stream that waited
    // before continues.
    ops.event_record(event, c)?;
    ops.stream_wait_event(b, event)?;
    t.hold(a, 1)?;
    ops.event_record(event, a)?;
    t.tell("wait for who waited for the record before", t.sync(b));
    t.tell("query the event", ops.event_query(event));
    t.release(1);
    t.tell("wait for the event", ops.event_synchronize(event));
    ops.event_destroy(event)?;
    [a, b, c].into_iter().try_for_each(|stream| ops.stream_destroy(stream))
}

fn event_destroyed_while_awaited(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, b, order) = (t.stream()?, t.stream()?, Order::default());
    let event = t.event()?;
    t.hold(a, 0)?;
    t.mark(a, &order, "first")?;
    ops.event_record(event, a)?;
    ops.stream_wait_event(b, event)?;
    t.mark(b, &order, "second")?;
    t.tell("destroy the event", ops.event_destroy(event));
    t.tell("query who waits", ops.stream_query(b));
    t.release(0);
    t.tell("wait for who waits", t.sync(b));
    t.say_order(&order);
    ops.stream_destroy(a)?;
    ops.stream_destroy(b)
}

fn event_times(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, b) = (t.stream()?, t.stream()?);
    let timed = EventFlags { timing: true, blocking: false };
    let (start, end, untimed) = (ops.event_create(timed)?, ops.event_create(timed)?, t.event()?);
    let sign = |result: Result<i64>| result.map(|nanos| nanos >= 0);
    t.tell("both never recorded", sign(ops.event_elapsed(start, end)));
    ops.event_record(start, a)?;
    t.sync(a)?;
    t.tell("the end never recorded", sign(ops.event_elapsed(start, end)));
    t.tell("the start never recorded", sign(ops.event_elapsed(end, start)));
    t.hold(a, 0)?;
    ops.event_record(end, a)?;
    t.tell("the end pending", sign(ops.event_elapsed(start, end)));
    t.release(0);
    t.sync(a)?;
    t.tell("in order", sign(ops.event_elapsed(start, end)));
    t.tell("an event with itself", ops.event_elapsed(start, start).map(|nanos| nanos == 0));
    ops.event_record(untimed, a)?;
    t.sync(a)?;
    t.tell("without timing", sign(ops.event_elapsed(start, untimed)));
    ops.event_record(end, b)?;
    t.sync(b)?;
    t.tell("of two streams", sign(ops.event_elapsed(start, end)));
    t.tell("the wrong way round", ops.event_elapsed(end, start).map(|nanos| nanos <= 0));
    [start, end, untimed].into_iter().try_for_each(|event| ops.event_destroy(event))?;
    ops.stream_destroy(a)?;
    ops.stream_destroy(b)
}

fn host_functions(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, order) = (t.stream()?, Order::default());
    t.hold(a, 0)?;
    t.tell("function", t.mark(a, &order, "one"));
    t.tell("function", t.mark(a, &order, "two"));
    ops.stream_write_word(a, t.word_at(8), 1)?;
    t.tell("function", t.mark(a, &order, "three"));
    t.say_order(&order);
    t.tell("query", ops.stream_query(a));
    t.release(0);
    t.tell("wait", t.sync(a));
    t.say_order(&order);
    // Later work waits for the function's return.
    let (slow, words) = (Arc::new(leasehold_core::sync::atomic::AtomicU32::new(0)), t.word_at(9));
    let set = slow.clone();
    ops.host_function(
        a,
        Box::new(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            set.store(1, leasehold_core::sync::atomic::Ordering::Release);
        }),
    )?;
    ops.stream_write_word(a, words, 1)?;
    while t.word(9) == 0 {
        std::thread::yield_now();
    }
    t.say(format!(
        "the function was over before the word: {}",
        slow.load(leasehold_core::sync::atomic::Ordering::Acquire)
    ));
    t.tell("wait", t.sync(a));
    ops.stream_destroy(a)
}

fn order_of_three_streams(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (a, b, c, order) = (t.stream()?, t.stream()?, t.stream()?, Order::default());
    let (first, second) = (t.event()?, t.event()?);
    t.hold(a, 0)?;
    t.mark(a, &order, "a1")?;
    ops.event_record(first, a)?;
    let wait = |stream: NativeStream, event| ops.stream_wait_event(stream, event);
    wait(b, first)?;
    t.mark(b, &order, "b1")?;
    ops.event_record(second, b)?;
    ops.stream_write_word(b, t.word_at(8), 1)?;
    wait(c, second)?;
    t.mark(c, &order, "c1")?;
    ops.stream_write_word(c, t.word_at(9), 1)?;
    ops.stream_wait_word(a, t.word_at(9), 1)?;
    t.mark(a, &order, "a2")?;
    for (name, stream) in [("a", a), ("b", b), ("c", c)] {
        t.tell(format!("query {name}"), ops.stream_query(stream));
    }
    t.tell("query the first event", ops.event_query(first));
    t.release(0);
    t.tell("wait for a", t.sync(a));
    t.tell("query b", ops.stream_query(b));
    t.tell("query the second event", ops.event_query(second));
    t.say(format!("words {} {}", t.word(8), t.word(9)));
    t.say_order(&order);
    t.tell("wait for c", t.sync(c));
    [first, second].into_iter().try_for_each(|event| ops.event_destroy(event))?;
    [a, b, c].into_iter().try_for_each(|stream| ops.stream_destroy(stream))
}

fn free_waits(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let stream = t.stream()?;
    let at = t.filled(stream, 4, 0)?;
    let order = Order::default();
    let slow = order.clone();
    ops.host_function(
        stream,
        Box::new(move || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            slow.lock().push("work");
        }),
    )?;
    t.tell("free while work is pending", ops.free(at));
    order.lock().push("free");
    t.tell("wait", t.sync(stream));
    t.say_order(&order);
    ops.stream_destroy(stream)
}
