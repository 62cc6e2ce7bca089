"""Read by PyInstaller: what a program that it freezes needs of this package.

Machine code that packages carry was made for certain sources of this package. So these go along, beside their bytecode.
"""

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

datas = collect_data_files("fastexchange")
hiddenimports = collect_submodules("fastexchange")
module_collection_mode = "pyz+py"
