; What a compiler emits for: s = ""; for i in 0..10 { t = [i, i]; s += "*" }; print(s). Prints ten stars and ok.
declare void @tl_mem_function_enter(i64)
declare void @tl_mem_function_exit_notail()
declare void @tl_mem_enter_scope()
declare void @tl_mem_exit_scope()
declare ptr @tl_mem_get_buffer(i64, i64)
declare void @tl_mem_register_struct(ptr)
declare i64 @tl_get_object_count()
declare ptr @malloc(i64)
declare ptr @memcpy(ptr, ptr, i64)
declare i32 @puts(ptr)

@ok = private constant [3 x i8] c"ok\00"
@bad = private constant [7 x i8] c"not ok\00"

define i32 @main() {
entry:
  call void @tl_mem_function_enter(i64 1)
  %empty = call ptr @tl_mem_get_buffer(i64 0, i64 1)
  store i8 0, ptr %empty
  br label %loop

loop:
  %i = phi i64 [ 0, %entry ], [ %i1, %loop ]
  %s = phi ptr [ %empty, %entry ], [ %new, %loop ]
  call void @tl_mem_enter_scope()
  %t = call ptr @malloc(i64 16)
  call void @tl_mem_register_struct(ptr %t)
  store i64 %i, ptr %t
  ; The old string stays readable while the new one is written.
  %size = add i64 %i, 2
  %new = call ptr @tl_mem_get_buffer(i64 0, i64 %size)
  %moved = icmp ne ptr %new, %s
  %bytes = select i1 %moved, i64 %i, i64 0
  %c = call ptr @memcpy(ptr %new, ptr %s, i64 %bytes)
  %at = getelementptr i8, ptr %new, i64 %i
  store i8 42, ptr %at
  %i1 = add i64 %i, 1
  %end = getelementptr i8, ptr %new, i64 %i1
  store i8 0, ptr %end
  call void @tl_mem_exit_scope()
  %done = icmp eq i64 %i1, 10
  br i1 %done, label %out, label %loop

out:
  %p = call i32 @puts(ptr %new)
  notail call void @tl_mem_function_exit_notail()
  %live = call i64 @tl_get_object_count()
  %wrong = icmp ne i64 %live, 0
  %text = select i1 %wrong, ptr @bad, ptr @ok
  %q = call i32 @puts(ptr %text)
  %r = zext i1 %wrong to i32
  ret i32 %r
}
