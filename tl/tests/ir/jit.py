"""JIT-compiles an LLVM IR program with llvmlite and runs it against the shared library: jit.py LIBRARY PROGRAM.ll

Exits with what the program's main returned.
"""

import ctypes
import sys

import llvmlite.binding as llvm

library, program = sys.argv[1:3]
try:
    llvm.initialize()
except RuntimeError:
    pass  # newer versions do it themselves
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()
llvm.load_library_permanently(library)
with open(program, encoding="utf-8") as file:
    module = llvm.parse_assembly(file.read())
module.verify()
engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine(opt=2))
engine.finalize_object()
main = ctypes.CFUNCTYPE(ctypes.c_int)(engine.get_function_address("main"))
sys.exit(main())
