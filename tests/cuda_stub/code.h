/* Part of libcuda.c: contexts, what a cubin says, its kernels, and occupancy. */

/* Contexts */

/* Ends all that belongs to the context: streams, events, modules, functions, memory. */
static void empty(Context *context)
{
    for (size_t place = 0; place < BUCKETS; place++)
        for (Object *object = buckets[place]; object; object = object->next)
            if (object->context == context)
                object->alive = 0;
    for (long i = allocations.count - 1; i >= 0; i--)
        if (allocations.items[i].context == context && !allocations.items[i].pool)
            forget(&allocations.items[i]);
}

static void reset(Context *context)
{
    empty(context);
    context->active = 0;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device)
{
    ENTER;
    CHECK(valid_device(device), INVALID_DEVICE);
    CHECK(context, INVALID_VALUE);
    primaries[device]->retained++;
    primaries[device]->active = 1;
    *context = primaries[device];
    LEAVE(SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER;
    CHECK(valid_device(device), INVALID_DEVICE);
    CHECK(primaries[device]->retained, INVALID_CONTEXT);
    if (!--primaries[device]->retained)
        reset(primaries[device]);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    ENTER;
    CHECK(valid_device(device), INVALID_DEVICE);
    reset(primaries[device]); /* it stays retained, and is active again when it is retained once more */
    LEAVE(SUCCESS);
}

static CUresult create_context(void **handle, CUdevice device)
{
    if (!handle)
        return INVALID_VALUE;
    if (!valid_device(device))
        return INVALID_DEVICE;
    if (depth == STACK)
        return INVALID_VALUE;
    Context *context = NEW(CONTEXT, Context, NULL);
    context->device = device;
    *handle = stack[depth++] = context;
    return SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(void **context, unsigned flags, CUdevice device)
{
    ENTER;
    (void)flags;
    LEAVE(create_context(context, device));
}

EXPORT CUresult cuCtxCreate_v4(void **context, const void *parameters, unsigned flags, CUdevice device)
{
    ENTER;
    (void)parameters, (void)flags;
    LEAVE(create_context(context, device));
}

EXPORT CUresult cuCtxDestroy_v2(void *handle)
{
    ENTER;
    Context *context = find(handle, CONTEXT);
    CHECK(context && !context->primary, INVALID_CONTEXT);
    empty(context);
    context->object.alive = 0;
    if (current() == context)
        depth--;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuCtxGetCurrent(void **context)
{
    ENTER;
    CHECK(context, INVALID_VALUE);
    *context = current();
    LEAVE(SUCCESS);
}

EXPORT CUresult cuCtxSetCurrent(void *handle)
{
    ENTER;
    Context *context = find(handle, CONTEXT);
    CHECK(context || !handle, INVALID_CONTEXT);
    if (!handle)
        depth -= depth > 0; /* takes the top off */
    else
        stack[depth ? depth - 1 : depth++] = context; /* replaces the top */
    LEAVE(SUCCESS);
}

EXPORT CUresult cuCtxPushCurrent_v2(void *handle)
{
    ENTER;
    Context *context = find(handle, CONTEXT);
    CHECK(context, INVALID_CONTEXT);
    CHECK(depth < STACK, INVALID_VALUE);
    stack[depth++] = context;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuCtxPopCurrent_v2(void **context)
{
    ENTER;
    CHECK(depth, INVALID_CONTEXT);
    depth--;
    if (context)
        *context = stack[depth];
    LEAVE(SUCCESS);
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER_CONTEXT;
    CHECK(device, INVALID_VALUE);
    *device = context->device;
    LEAVE(SUCCESS);
}

/* The context given, or with NULL the current one. */
EXPORT CUresult cuCtxSynchronize(void)
{
    ENTER_CONTEXT;
    (void)context;
    TRY(not_capturing());
    note(__func__, NULL);
    LEAVE(SUCCESS);
}

/* Code: a cubin is an ELF file with a section .text.K and a section .nv.info.K per kernel K. */

enum { INFO_REGISTERS = 0x2f, INFO_FRAME = 0x11, INFO_PARAMETER = 0x17, INFO_LONG_PARAMETER = 0x45, INFO_MAX_THREADS = 0x05, INFO_SIZE = 0x19 };

static unsigned word(const unsigned char *at, int bytes)
{
    unsigned value = 0;
    memcpy(&value, at, (size_t)bytes);
    return value;
}

static void set_parameter(Kernel *kernel, unsigned ordinal, unsigned offset, unsigned size)
{
    if (ordinal >= kernel->parameter_count) {
        kernel->parameters = must(realloc(kernel->parameters, (ordinal + 1) * sizeof *kernel->parameters));
        memset(kernel->parameters + kernel->parameter_count, 0,
               (ordinal + 1 - kernel->parameter_count) * sizeof *kernel->parameters);
        kernel->parameter_count = ordinal + 1;
    }
    kernel->parameters[ordinal] = (stub_parameter){offset, size};
    if (offset + size > kernel->size)
        kernel->size = offset + size;
}

static Kernel *kernel_named(const Library *library, const char *name)
{
    for (Kernel *kernel = library->kernels; kernel; kernel = kernel->next)
        if (!strcmp(kernel->name, name))
            return kernel;
    return NULL;
}

/* Reads one section of attributes: a kernel's own, or with NULL the file's, which name their kernel by symbol. */
static void read_info(Library *library, Kernel *own, const unsigned char *at, size_t size, const Elf64_Sym *symbols,
                      size_t symbol_count, const char *names)
{
    for (const unsigned char *end = at + size; at + 4 <= end;) {
        unsigned format = at[0], attribute = at[1], value = word(at + 2, 2);
        const unsigned char *data = at + 4;
        at = data + (format == 4 ? value : 0);
        if (at > end)
            return;
        if (!own && format == 4 && value == 8 && (attribute == INFO_REGISTERS || attribute == INFO_FRAME)) {
            unsigned symbol = word(data, 4);
            Kernel *kernel = symbol < symbol_count ? kernel_named(library, names + symbols[symbol].st_name) : NULL;
            if (kernel && attribute == INFO_REGISTERS)
                kernel->registers = (int)word(data + 4, 4);
            else if (kernel)
                kernel->local = word(data + 4, 4);
        } else if (own && attribute == INFO_PARAMETER && format == 4 && value >= 12) {
            set_parameter(own, word(data + 4, 2), word(data + 6, 2), word(data + 8, 4) >> 18);
        } else if (own && attribute == INFO_LONG_PARAMETER && format == 4 && value >= 12) { /* above 4 KB of parameters */
            set_parameter(own, word(data + 4, 2), word(data + 6, 2), word(data + 8, 4));
        } else if (own && attribute == INFO_SIZE && value > own->size) {
            own->size = value;
        } else if (own && attribute == INFO_MAX_THREADS && format == 4 && value >= 12) {
            int threads = (int)(word(data, 4) * word(data + 4, 4) * word(data + 8, 4));
            if (threads > 0 && threads < own->max_threads)
                own->max_threads = threads;
        }
    }
}

static const char *after_prefix(const char *text, const char *prefix)
{
    size_t length = strlen(prefix);
    return strncmp(text, prefix, length) ? NULL : text + length;
}

/* The size of the ELF image at `code`; 0: it is none. */
static size_t image_size(const void *code)
{
    const Elf64_Ehdr *header = code;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_machine != 190)
        return 0; /* 190: EM_CUDA */
    size_t size = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    size_t programs = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    const Elf64_Shdr *sections = (const void *)((const char *)code + header->e_shoff);
    size = programs > size ? programs : size;
    for (unsigned i = 0; i < header->e_shnum; i++)
        if (sections[i].sh_type != SHT_NOBITS && sections[i].sh_offset + sections[i].sh_size > size)
            size = sections[i].sh_offset + sections[i].sh_size;
    return size;
}

static void add_global(Library *library, const char *name, const Elf64_Sym *symbol, const Elf64_Shdr *section)
{
    Global *global = must(calloc(1, sizeof *global));
    global->name = must(strdup(name));
    global->size = symbol->st_size;
    if (section->sh_type != SHT_NOBITS)
        global->content = library->image + section->sh_offset + symbol->st_value;
    global->next = library->globals;
    library->globals = global;
}

static CUresult load(Library **result, const void *code)
{
    size_t size = code ? image_size(code) : 0;
    if (!size)
        return code ? INVALID_IMAGE : INVALID_VALUE;
    Library *library = NEW(LIBRARY, Library, NULL);
    library->image = must(malloc(size));
    memcpy(library->image, code, size);
    const Elf64_Ehdr *header = (const void *)library->image;
    const Elf64_Shdr *sections = (const void *)(library->image + header->e_shoff);
    const char *names = (const char *)library->image + sections[header->e_shstrndx].sh_offset;
    const Elf64_Sym *symbols = NULL;
    const char *symbol_names = NULL;
    size_t symbol_count = 0;
    Kernel **last = &library->kernels;
    for (unsigned i = 0; i < header->e_shnum; i++)
        if (sections[i].sh_type == SHT_SYMTAB) {
            symbols = (const void *)(library->image + sections[i].sh_offset);
            symbol_count = sections[i].sh_size / sizeof *symbols;
            symbol_names = (const char *)library->image + sections[sections[i].sh_link].sh_offset;
        }
    for (size_t i = 0; i < symbol_count; i++) {
        if (!symbols[i].st_shndx || symbols[i].st_shndx >= header->e_shnum)
            continue;
        const Elf64_Shdr *section = &sections[symbols[i].st_shndx];
        const char *name = symbol_names + symbols[i].st_name, *in = names + section->sh_name;
        int type = ELF64_ST_TYPE(symbols[i].st_info);
        if (type == STT_OBJECT && (after_prefix(in, ".nv.global") || !strcmp(in, ".nv.constant3")))
            add_global(library, name, &symbols[i], section);
        if (type != STT_FUNC || !(symbols[i].st_other & 0x10)) /* 0x10: an entry */
            continue;
        Kernel *kernel = NEW(KERNEL, Kernel, NULL);
        kernel->library = library;
        kernel->name = must(strdup(name));
        kernel->max_threads = 1024;
        *last = kernel;
        last = &kernel->next;
    }
    for (unsigned i = 0; i < header->e_shnum; i++) {
        const char *name = names + sections[i].sh_name, *rest;
        Kernel *kernel;
        if (!strcmp(name, ".nv.info"))
            read_info(library, NULL, library->image + sections[i].sh_offset, sections[i].sh_size, symbols, symbol_count,
                      symbol_names);
        else if ((rest = after_prefix(name, ".nv.info.")) && (kernel = kernel_named(library, rest)))
            read_info(library, kernel, library->image + sections[i].sh_offset, sections[i].sh_size, symbols,
                      symbol_count, symbol_names);
        else if ((rest = after_prefix(name, ".nv.shared.")) && (kernel = kernel_named(library, rest)))
            kernel->shared = (unsigned)sections[i].sh_size;
        else if (!strcmp(name, ".nv.constant3"))
            library->constant = sections[i].sh_size;
    }
    library->architecture = (int)(header->e_flags >> 8 & 0xff) >= 50 ? (int)(header->e_flags >> 8 & 0xff)
        : (int)(header->e_flags & 0xff);
    for (Kernel *kernel = library->kernels; kernel; kernel = kernel->next)
        for (int device = 0; device < MAX_DEVICES; device++) {
            kernel->values[device][8] = SHARED_DEFAULT - (int)kernel->shared;
            kernel->values[device][9] = -1; /* carveout: the driver's choice */
        }
    *result = library;
    return SUCCESS;
}

static Module *module_in(Library *library, Context *context)
{
    for (Module *module = library->modules; module; module = module->next)
        if (module->object.alive && module->object.context == context)
            return module;
    Module *module = NEW(MODULE, Module, context);
    module->library = library;
    module->next = library->modules;
    return library->modules = module;
}

static Handle *function_in(Kernel *kernel, Context *context)
{
    for (Handle *function = kernel->functions; function; function = function->next)
        if (function->object.alive && function->object.context == context)
            return function;
    Handle *function = NEW(FUNCTION, Handle, context);
    function->kernel = kernel;
    function->next = kernel->functions;
    return kernel->functions = function;
}

static void unload(Library *library)
{
    library->object.alive = 0;
    for (Module *module = library->modules; module; module = module->next)
        module->object.alive = 0;
    for (Kernel *kernel = library->kernels; kernel; kernel = kernel->next) {
        kernel->object.alive = 0;
        for (Handle *function = kernel->functions; function; function = function->next)
            function->object.alive = 0;
    }
    for (Global *global = library->globals; global; global = global->next)
        for (int device = 0; device < MAX_DEVICES; device++) {
            Allocation *allocation = global->place[device] ? allocation_of(global->place[device]) : NULL;
            if (allocation)
                forget(allocation);
        }
}

EXPORT CUresult cuLibraryLoadData(void **result, const void *code, int *options, void **option_values, unsigned count,
                                  int *library_options, void **library_values, unsigned library_count)
{
    ENTER;
    (void)options, (void)option_values, (void)count, (void)library_options, (void)library_values, (void)library_count;
    CHECK(result, INVALID_VALUE);
    Library *library;
    TRY(load(&library, code));
    *result = library;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuLibraryUnload(void *handle)
{
    ENTER;
    Library *library = find(handle, LIBRARY);
    CHECK(library, INVALID_HANDLE);
    unload(library);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuLibraryGetKernel(void **result, void *handle, const char *name)
{
    ENTER;
    Library *library = find(handle, LIBRARY);
    CHECK(library, INVALID_HANDLE);
    CHECK(result && name, INVALID_VALUE);
    Kernel *kernel = kernel_named(library, name);
    CHECK(kernel, NOT_FOUND);
    *result = kernel;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuLibraryGetModule(void **result, void *handle)
{
    ENTER_CONTEXT;
    Library *library = find(handle, LIBRARY);
    CHECK(library, INVALID_HANDLE);
    CHECK(result, INVALID_VALUE);
    *result = module_in(library, context);
    LEAVE(SUCCESS);
}

static CUresult get_global(CUdeviceptr *pointer, size_t *size, Library *library, const char *name, Context *context)
{
    if (!name)
        return INVALID_VALUE;
    for (Global *global = library->globals; global; global = global->next) {
        if (strcmp(global->name, name))
            continue;
        CUdeviceptr *place = &global->place[context->device];
        if (!*place) {
            CUresult result = allocate(place, global->size, (Allocation){
                .type = DEVICE, .device = context->device, .context = context});
            if (result)
                return result;
            if (global->content)
                memcpy((void *)(uintptr_t)*place, global->content, global->size);
            else
                memset((void *)(uintptr_t)*place, 0, global->size);
        }
        if (pointer)
            *pointer = *place;
        if (size)
            *size = global->size;
        return SUCCESS;
    }
    return NOT_FOUND;
}

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *pointer, size_t *size, void *handle, const char *name)
{
    ENTER_CONTEXT;
    Library *library = find(handle, LIBRARY);
    CHECK(library, INVALID_HANDLE);
    LEAVE(get_global(pointer, size, library, name, context));
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *size, void *handle, const char *name)
{
    ENTER_CONTEXT;
    (void)context;
    Module *module = find(handle, MODULE);
    CHECK(module, INVALID_HANDLE);
    LEAVE(get_global(pointer, size, module->library, name, module->object.context));
}

EXPORT CUresult cuModuleLoadData(void **result, const void *code)
{
    ENTER_CONTEXT;
    TRY(not_capturing());
    CHECK(result, INVALID_VALUE);
    Library *library;
    TRY(load(&library, code));
    Module *module = module_in(library, context);
    module->owner = 1;
    *result = module;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuModuleUnload(void *handle)
{
    ENTER_CONTEXT;
    (void)context;
    Module *module = find(handle, MODULE);
    CHECK(module && module->owner, INVALID_HANDLE);
    unload(module->library);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuModuleGetFunction(void **result, void *handle, const char *name)
{
    ENTER_CONTEXT;
    (void)context;
    Module *module = find(handle, MODULE);
    CHECK(module, INVALID_HANDLE);
    CHECK(result && name, INVALID_VALUE);
    Kernel *kernel = kernel_named(module->library, name);
    CHECK(kernel, NOT_FOUND);
    *result = function_in(kernel, module->object.context);
    LEAVE(SUCCESS);
}

/* The kernel of a CUkernel or CUfunction, and of the latter the function. */
static Kernel *kernel_of(void *handle, Handle **function)
{
    *function = find(handle, FUNCTION);
    return *function ? (*function)->kernel : find(handle, KERNEL);
}

EXPORT CUresult cuKernelGetFunction(void **result, void *handle)
{
    ENTER_CONTEXT;
    Kernel *kernel = find(handle, KERNEL);
    CHECK(kernel, INVALID_HANDLE);
    CHECK(result, INVALID_VALUE);
    *result = function_in(kernel, context);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuFuncGetParamInfo(void *handle, size_t index, size_t *offset, size_t *size)
{
    ENTER;
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    CHECK(kernel, INVALID_HANDLE);
    CHECK(offset && index < kernel->parameter_count, INVALID_VALUE);
    *offset = kernel->parameters[index].offset;
    if (size)
        *size = kernel->parameters[index].size;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuFuncGetParamCount(void *handle, size_t *count)
{
    ENTER;
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    CHECK(kernel, INVALID_HANDLE);
    CHECK(count, INVALID_VALUE);
    *count = kernel->parameter_count;
    LEAVE(SUCCESS);
}

static int value_of(const Kernel *kernel, const Handle *function, int device, int attribute)
{
    switch (attribute) {
        case 0: return kernel->max_threads;
        case 1: return (int)kernel->shared;
        case 2: return (int)kernel->library->constant;
        case 3: return (int)kernel->local;
        case 4: return kernel->registers;
        case 5: case 6: return kernel->library->architecture;
        default: return function && function->set & 1u << attribute ? function->values[attribute]
            : kernel->values[device][attribute];
    }
}

static CUresult check_value(const Kernel *kernel, int attribute, int value)
{
    switch (attribute) {
        case 8: return value < 0 || value + (int)kernel->shared > SHARED_OPTIN ? INVALID_VALUE : SUCCESS;
        case 9: return value < -1 || value > 100 ? INVALID_VALUE : SUCCESS;
        case 11: case 12: case 13: return value < 0 ? INVALID_VALUE : SUCCESS;
        case 14: case 15: return SUCCESS;
        default: return INVALID_VALUE;
    }
}

EXPORT CUresult cuKernelGetAttribute(int *value, int attribute, void *handle, CUdevice device)
{
    ENTER;
    Kernel *kernel = find(handle, KERNEL);
    CHECK(kernel, INVALID_HANDLE);
    CHECK(valid_device(device), INVALID_DEVICE);
    CHECK(value && attribute >= 0 && attribute <= 17, INVALID_VALUE);
    *value = value_of(kernel, NULL, device, attribute);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuKernelSetAttribute(int attribute, int value, void *handle, CUdevice device)
{
    ENTER;
    Kernel *kernel = find(handle, KERNEL);
    CHECK(kernel, INVALID_HANDLE);
    CHECK(valid_device(device), INVALID_DEVICE);
    TRY(check_value(kernel, attribute, value));
    kernel->values[device][attribute] = value;
    LEAVE(SUCCESS);
}

EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, void *handle)
{
    ENTER_CONTEXT;
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    CHECK(kernel, INVALID_HANDLE);
    CHECK(value && attribute >= 0 && attribute <= 17, INVALID_VALUE);
    if (!function)
        function = function_in(kernel, context);
    *value = value_of(kernel, function, function->object.context->device, attribute);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuFuncSetAttribute(void *handle, int attribute, int value)
{
    ENTER_CONTEXT;
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    CHECK(kernel, INVALID_HANDLE);
    TRY(check_value(kernel, attribute, value));
    if (!function)
        function = function_in(kernel, context);
    function->values[attribute] = value;
    function->set |= 1u << attribute;
    LEAVE(SUCCESS);
}

/* Occupancy */

static int active_blocks(const Kernel *kernel, unsigned long long threads, unsigned long long shared)
{
    unsigned long long lanes = (threads + 31) / 32 * 32, registers = ((unsigned)kernel->registers + 7u) / 8 * 8;
    unsigned long long blocks = 2048 / lanes, per_registers = registers ? REGISTERS / (registers * lanes) : 32;
    unsigned long long per_shared = SHARED_PER_SM / (shared + kernel->shared + 1024);
    blocks = blocks < 32 ? blocks : 32;
    blocks = blocks < per_shared ? blocks : per_shared;
    return (int)(blocks < per_registers ? blocks : per_registers);
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *handle, int threads, size_t shared)
{
    ENTER_CONTEXT;
    (void)context;
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    CHECK(kernel, INVALID_HANDLE);
    CHECK(blocks && threads >= 1, INVALID_VALUE);
    *blocks = threads > kernel->max_threads ? 0 : active_blocks(kernel, (unsigned)threads, shared);
    LEAVE(SUCCESS);
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, void *handle, size_t (*shared_of)(int),
                                                 size_t shared, int limit)
{
    ENTER_CONTEXT;
    (void)context, (void)shared_of, (void)shared;
    Handle *function;
    Kernel *kernel = kernel_of(handle, &function);
    CHECK(kernel, INVALID_HANDLE);
    CHECK(grid && block, INVALID_VALUE);
    *grid = occupancy_grid;
    *block = occupancy_block;
    if (*block > kernel->max_threads)
        *block = kernel->max_threads;
    if (limit > 0 && *block > limit)
        *block = limit;
    LEAVE(SUCCESS);
}
