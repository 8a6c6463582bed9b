//! Scenarios: modules, functions, launches.

use super::kernels::{Arguments, PTX};
use super::{Scenario, Trace};
use leasehold_core::Result;
use leasehold_cuda::driver::ops::{Launch, NativeFunction, NativeModule, NativeStream};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("modules", modules),
    Scenario::new("functions", functions),
    Scenario::new("launches", launches),
    Scenario::new("launch_misuse", launch_misuse),
    Scenario::new("dynamic_shared_memory", dynamic_shared_memory),
    Scenario::new("argument_buffers", argument_buffers),
];

impl Trace<'_> {
    pub(super) fn module(&self) -> Result<NativeModule> {
        self.ops.module_load(PTX.as_bytes())
    }

    pub(super) fn launch(&self, stream: NativeStream, launch: &Launch<'_>) -> Result<()> {
        // SAFETY: scenarios pass memory that lives, or ask for a refusal of the launch itself.
        unsafe { self.ops.launch(stream, launch) }
    }
}

fn modules(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    t.tell("load nothing", ops.module_load(b""));
    t.tell("load garbage", ops.module_load(b"hello"));
    t.tell("load PTX without a target", ops.module_load(b".version 8.0\n"));
    let broken = ".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry f() {\n";
    t.tell("load PTX that does not close", ops.module_load(broken.as_bytes()));
    let module = t.tell("load PTX", ops.module_load(PTX.as_bytes()));
    let Some(module) = module else { return Ok(()) };
    let with_zero = format!("{PTX}\0");
    let again = t.tell("load it again, ending with a zero", ops.module_load(with_zero.as_bytes()));
    t.say(format!("it is another one: {}", again != Some(module)));
    t.tell("a function", ops.module_function(module, "trace_add"));
    t.tell("a function that is not there", ops.module_function(module, "trace_none"));
    t.tell("a function without a name", ops.module_function(module, ""));
    let (one, two) =
        (ops.module_function(module, "trace_add")?, ops.module_function(module, "trace_add")?);
    t.say(format!("the same function twice: {}", one == two));
    if let Some(again) = again {
        t.tell("unload", ops.module_unload(again));
    }
    t.tell("unload", ops.module_unload(module));
    Ok(())
}

fn functions(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let module = t.module()?;
    for name in ["trace_add", "trace_store", "trace_small", "trace_nothing"] {
        let function = ops.module_function(module, name)?;
        t.tell(name, ops.function_info(function));
    }
    ops.module_unload(module)
}

fn launches(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream) = (t.module()?, t.stream()?);
    let add = ops.module_function(module, "trace_add")?;
    let (a, b, out) = (t.filled(stream, 8, 5)?, t.filled(stream, 8, 6)?, t.filled(stream, 8, 0)?);
    let arguments = Arguments::add(a, b, out, 6);
    t.tell("launch", t.launch(stream, &arguments.launch(add, 2, 3)));
    t.say_data("data", stream, out, 8)?;
    let store = ops.module_function(module, "trace_store")?;
    let arguments = Arguments::store(out, 0x1_0000_0000, 3, 2);
    t.tell("a struct as parameter", t.launch(stream, &arguments.launch(store, 1, 1)));
    t.say_data("data", stream, out, 8)?;
    // The driver reads arguments before the call returns.
    t.hold(stream, 0)?;
    let mut arguments = Arguments::add(a, b, out, 2);
    t.launch(stream, &arguments.launch(add, 1, 8))?;
    arguments.clobber();
    t.release(0);
    t.say_data("after the buffer was overwritten", stream, out, 8)?;
    // Kernels access pinned memory at its own address.
    let arguments = Arguments::store(t.word_at(8), 40, 3, 1);
    t.tell("write pinned memory", t.launch(stream, &arguments.launch(store, 1, 1)));
    t.tell("wait", t.sync(stream));
    t.say(format!("{} {} {}", t.word(8), t.word(9), t.word(10)));
    [a, b, out].into_iter().try_for_each(|at| ops.free(at))?;
    ops.stream_destroy(stream)?;
    ops.module_unload(module)
}

fn launch_misuse(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream) = (t.module()?, t.stream()?);
    let small = ops.module_function(module, "trace_small")?;
    let nothing = ops.module_function(module, "trace_nothing")?;
    let at = t.filled(stream, 1024, 0)?;
    let one = Arguments::one(at, 4096);
    let memories = [(at, 4, leasehold_hal::Access::ReadWrite); 3];
    let three = Arguments::new(&memories, &[]);
    let plain = three.launch(nothing, 1, 1);
    let cases: [(&str, Launch<'_>); 10] = [
        ("no blocks", Launch { grid: [0, 1, 1], ..plain }),
        ("no threads", Launch { block: [1, 0, 1], ..plain }),
        ("a block of 1025", Launch { block: [1025, 1, 1], ..plain }),
        ("a block of 32 x 33", Launch { block: [32, 33, 1], ..plain }),
        ("a block 65 deep", Launch { block: [1, 1, 65], ..plain }),
        ("a grid 65536 high", Launch { grid: [1, 65536, 1], ..plain }),
        ("more than 48 KiB of shared memory", Launch { shared: (48 << 10) + 1, ..plain }),
        ("1 MiB of shared memory", Launch { shared: 1 << 20, ..plain }),
        ("no function", Launch { function: NativeFunction::NULL, ..plain }),
        (
            "64 threads where 64 are allowed",
            Launch { block: [64, 1, 1], ..one.launch(small, 1, 1) },
        ),
    ];
    for (name, launch) in cases {
        t.tell(name, t.launch(stream, &launch));
        t.tell("wait", t.sync(stream));
    }
    t.tell("65 threads where 64 are allowed", t.launch(stream, &one.launch(small, 1, 65)));
    t.tell("wait", t.sync(stream));
    t.tell("going on", t.launch(stream, &three.launch(nothing, 1, 1)));
    t.tell("wait", t.sync(stream));
    ops.free(at)?;
    ops.stream_destroy(stream)?;
    ops.module_unload(module)
}

fn dynamic_shared_memory(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream) = (t.module()?, t.stream()?);
    let shared = ops.module_function(module, "trace_shared")?;
    let out = t.filled(stream, 1, 0)?;
    let words = 64 << 8;
    let arguments = Arguments::shared(out, words);
    let large = Launch { shared: words * 4, ..arguments.launch(shared, 1, 32) };
    t.tell("64 KiB without asking", t.launch(stream, &large));
    let optin = ops.device_properties(0)?.shared_optin;
    t.tell("ask for more than there is", ops.function_allow_shared(shared, optin + 1));
    t.tell("ask for all there is", ops.function_allow_shared(shared, optin));
    t.tell("64 KiB after asking", t.launch(stream, &large));
    t.say_data("sum", stream, out, 1)?;
    t.tell("ask for 64 KiB", ops.function_allow_shared(shared, words * 4));
    t.tell("a little more", t.launch(stream, &Launch { shared: words * 4 + 1024, ..large }));
    t.tell("wait", t.sync(stream));
    ops.free(out)?;
    ops.stream_destroy(stream)?;
    ops.module_unload(module)
}

fn argument_buffers(t: &mut Trace<'_>) -> Result<()> {
    let ops = t.ops;
    t.open()?;
    let (module, stream) = (t.module()?, t.stream()?);
    let add = ops.module_function(module, "trace_add")?;
    let (a, b, out) = (t.filled(stream, 4, 5)?, t.filled(stream, 4, 6)?, t.filled(stream, 4, 0)?);
    let whole = Arguments::add(a, b, out, 4);
    let launch = whole.launch(add, 1, 4);
    t.tell(
        "without the parameter",
        t.launch(stream, &Launch { args: &launch.args[..24], ..launch }),
    );
    t.tell(
        "with half of the parameter",
        t.launch(stream, &Launch { args: &launch.args[..26], ..launch }),
    );
    let mut padded = launch.args.to_vec();
    padded.extend_from_slice(&[0; 4]);
    t.tell("with four bytes too many", t.launch(stream, &Launch { args: &padded, ..launch }));
    t.say_data("data", stream, out, 4)?;
    [a, b, out].into_iter().try_for_each(|at| ops.free(at))?;
    ops.stream_destroy(stream)?;
    ops.module_unload(module)
}
