//! Checks of device memory in stream order.

use crate::case::{Case, Need, Outcome, Stop, check, check_eq, expect_error};
use crate::env::Env;
use leasehold::{
    Array, Context, Error, Finding, GraphOperator, Operand, Runtime, Stream, View, bytemuck,
};

pub(crate) const CASES: &[Case] = &[
    Case::runtime(
        236,
        "a check names what it finds, fails its stream from there on, and no other",
        &[Need::HostCalls],
        names,
    )
    .sanitizer(),
    Case::runtime(
        237,
        "a check of a graph fails the launch that finds, and not those before",
        &[Need::HostCalls, Need::Graphs],
        replayed,
    )
    .sanitizer(),
    Case::runtime(
        238,
        "a check sees the values of its place in the order of all streams",
        &[Need::HostCalls, Need::Hold],
        order,
    )
    .sanitizer(),
    Case::runtime(
        239,
        "a check that cannot be is refused, and loses nothing",
        &[Need::HostCalls],
        refused,
    )
    .sanitizer(),
];

/// The finding that a stream failed with.
fn finding(result: Result<(), Error>) -> Outcome<Finding> {
    match result {
        Err(Error::Check(finding)) => Ok((*finding).clone()),
        Err(e) => Err(Stop::Failed(format!("a finding is no {}: {e}", e.kind()))),
        Ok(()) => Err(Stop::Failed("a finding went unnoticed".into())),
    }
}

/// Looks for the first value above a limit.
fn below(stream: &Stream, values: &Array<u32>, limit: u32) -> leasehold::Result<()> {
    stream.inspect("below", values.view(), move |bytes| {
        let mut values = bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned::<u32>);
        match values.clone().position(|value| value > limit) {
            Some(i) => {
                let value = values.nth(i).unwrap_or_default();
                Err(Finding::new("limit", i as u64, value.into()).into())
            }
            None => Ok(()),
        }
    })
}

fn names(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (one, two) = (runtime.create_stream()?, runtime.create_stream()?);
    let list: Vec<u32> = (0..3000).map(|i| if i % 1000 == 777 { 5000 + i } else { i }).collect();
    let (values, flags) = (runtime.upload(&list)?, runtime.upload(&[1u32, 0, 7])?);
    let (before, after) = (runtime.zeros::<u32>(64)?, runtime.zeros::<u32>(64)?);
    runtime.synchronize()?;
    below(&one, &values, 7777)?;
    one.fill(before.view(), 3u32)?;
    below(&one, &values, 5000)?;
    // Work behind a finding fails with it, at the latest where it would run.
    let behind = one.fill(after.view(), 4u32);
    check!(behind.is_ok() || matches!(behind, Err(Error::Check(_))), "the cause is lost");
    let found = finding(one.synchronize())?;
    check_eq!((found.index, found.value), (777, 5777.0), "the first value above the limit");
    check_eq!(found.name, "limit", "the name of the check");
    check_eq!(one.failure().map(|e| e.kind()), Some("Check"), "the stream's cause");
    // The context lives: another stream checks and works.
    two.expect(flags.slice(..1), "a flag")?;
    two.expect(flags.slice(2..), "another flag")?;
    two.synchronize()?;
    let read = two.runtime();
    check_eq!(read.to_vec::<u32>(&before)?, vec![3; 64], "what came before the finding");
    check_eq!(read.to_vec::<u32>(&values)?, list, "what was checked");
    // So does the next one, up to its own finding, which has the name and the value too.
    two.expect(flags.slice(1..2), "a flag that is down")?;
    let found = finding(two.synchronize())?;
    check_eq!((found.index, found.value), (0, 0.0), "a flag that is down");
    check_eq!(found.name, "a flag that is down", "the name of the check");
    let three = runtime.create_stream()?;
    three.synchronize()?;
    let after = three.runtime().to_vec::<u32>(&after);
    // A read of what the failed work was to write has its cause, or finds the memory as it was.
    check!(
        matches!(&after, Err(Error::Check(_))) || after.as_ref().is_ok_and(|v| v == &[0; 64]),
        "what was to come behind a finding: {after:?}"
    );
    Ok(())
}

/// An operator with a check.
struct LastValue<'a>(&'a Array<u32>);

impl GraphOperator for LastValue<'_> {
    fn name(&self) -> &str {
        "last value"
    }
    fn accesses(&self) -> Vec<Operand<'_>> {
        vec![self.0.read()]
    }
    fn encode(&self, stream: &Stream) -> leasehold::Result<()> {
        stream.expect(self.0.slice(255..), "the last value")
    }
}

fn replayed(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (source, out) = (runtime.zeros::<u32>(256)?, runtime.zeros::<u32>(256)?);
    let graph = runtime.record_graph(|r| {
        let between = r.alloc_array::<u32>(256)?;
        r.stream().copy(between.view(), source.view())?;
        below(r.stream(), &between, 1000)?;
        r.add_graph_operator(&LastValue(&between))?;
        r.stream().copy(out.view(), between.view())
    })?;
    // Launches that follow one another without a wait of the host.
    let stream = runtime.create_stream()?;
    let mut last = vec![2u32; 256];
    for round in 1..=3 {
        last.fill(round);
        if round == 3 {
            (last[200], last[100]) = (4000, 5000);
        }
        let launched =
            stream.upload(source.view(), &last).and_then(|()| graph.launch_on(&stream).map(drop));
        check!(launched.is_ok() || round == 3, "launch {round}: {launched:?}");
    }
    let found = finding(stream.synchronize())?;
    check_eq!((found.index, found.value), (100, 5000.0), "the first value above the limit");
    // The graph lives, and the next launch, on another stream, checks again.
    let next = runtime.create_stream()?;
    for round in [8u32, 9] {
        next.fill(out.view(), 0u32)?;
        next.fill(source.view(), round)?;
        graph.launch_on(&next)?;
        next.synchronize()?;
        check_eq!(next.runtime().to_vec::<u32>(&out)?, vec![round; 256], "a later launch");
    }
    next.fill(source.slice(255..).view(), 0u32)?;
    let launched = graph.launch_on(&next).map(drop);
    let found = finding(launched.and_then(|()| next.synchronize()))?;
    check_eq!(found.name, "the last value", "the check that found");
    Ok(())
}

fn order(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    // A good flag that is written late, and a bad one.
    for (early, late) in [(0u32, 1u32), (1, 0)] {
        let (one, two) = (runtime.create_stream()?, runtime.create_stream()?);
        let flag = runtime.upload(&[early])?;
        runtime.synchronize()?;
        let hold = env.hold_runtime(&one)?;
        one.fill(flag.view(), late)?;
        two.expect(&flag, "written late")?;
        // A later write does not reach the check, nor does who gets the memory next.
        one.fill(flag.view(), early)?;
        drop(flag);
        let next = one.runtime().upload(&[early])?;
        hold.release_late(env)?;
        let result = two.synchronize();
        match late {
            0 => check_eq!(finding(result)?.name, "written late", "the name of the check"),
            _ => result?,
        }
        check_eq!(one.runtime().to_vec::<u32>(&next)?, [early], "the memory of the flag");
    }
    Ok(())
}

/// Makes a bad check on a stream that is sound, and sees that it leaves nothing.
fn is_refused(
    stream: &Stream,
    kind: &str,
    what: &str,
    make: impl FnOnce() -> leasehold::Result<()>,
) -> Outcome {
    let before = stream.now();
    expect_error(make(), kind, what)?;
    check_eq!(stream.now(), before, "the stream's end after {what}");
    Ok(())
}

fn refused(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let stream = runtime.create_stream()?;
    let flags = runtime.upload(&[1u32, 2])?;
    let invalid = "InvalidArgument";
    is_refused(&stream, invalid, "a check of no flag", || {
        stream.expect(flags.slice(1..1), "none")
    })?;
    is_refused(&stream, invalid, "a check of two flags", || stream.expect(&flags, "two"))?;
    is_refused(&stream, invalid, "a look at no bytes", || {
        stream.inspect("nothing", flags.slice(..0).view(), |_| Ok(()))
    })?;
    is_refused(&stream, invalid, "a flag of two bytes", || {
        stream.expect(flags.part(..2)?, "two bytes")
    })?;
    let mut outcome = Ok(());
    let _graph = runtime.record_graph(|r| {
        let inner = r.alloc_array::<u32>(1)?;
        outcome = is_refused(&stream, "Recording", "a check of a recording's memory", || {
            stream.expect(&inner, "of a recording")
        });
        r.stream().fill(inner.view(), 1u32)
    });
    outcome?;
    if let Ok(other) = env.other() {
        let id = other.device.info().id;
        if id != env.id() {
            let context = Context::with_backends(vec![other.backend.clone()]);
            let theirs: Runtime = env.runtime_of(&context, id)?;
            let strange = theirs.upload(&[1u32])?;
            is_refused(&stream, invalid, "a check of another device's memory", || {
                stream.expect(&strange, "strange")
            })?;
        }
    }
    stream.expect(flags.slice(..1), "a flag")?;
    stream.synchronize()?;
    // A stream that has failed answers with its first cause.
    stream.inspect("fails", flags.view(), |_| Err(Finding::new("first", 1, 2.0).into()))?;
    check_eq!(finding(stream.synchronize())?.name, "first", "the first cause");
    let again = finding(stream.expect(flags.slice(..1), "second"))?;
    check_eq!(again.name, "first", "the cause of a stream that has failed");
    check_eq!(runtime.create_stream()?.runtime().to_vec::<u32>(&flags)?, [1, 2], "the flags");
    Ok(())
}
